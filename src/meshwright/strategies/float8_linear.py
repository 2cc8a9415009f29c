"""Linear layers that multiply in float8, forward and backward.

Inputs and weights are rounded to e4m3 (3 bits of mantissa), gradients of outputs to e5m2 (2 bits, but a wider range).
Each tensor is first scaled so that its largest element fits. The scale is found in the step, and it is a power of two:
then the same number is rounded alike in any micro-batch, on any rank and in any part of a tensor, except where it
underflows. Products accumulate in fp32 and return bf16.

Operators are plain ones, so that torch.compile can fuse scaling and rounding with their neighbours. Without it they
cost more than the products gain.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.torch_private.scaled_products import scaled_mm

ALIGNED = 16
"""Float8 products need sides that are multiples of it."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max}
_LEAST = 2.0**-40
"""The largest element is taken to be at least this, so that the scale of zeros is finite."""
_EXPONENT = 0x7F800000
"""The bits of an fp32 number's exponent."""


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with factors rounded to float8; the result has the weight's dtype."""
    rows = x.to(weight.dtype).reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count % ALIGNED:
        rows = F.pad(rows, (0, 0, 0, -count % ALIGNED))  # rows of zeros change neither scale nor sums
    product: Tensor = _Product.apply(rows, weight)
    result = product[:count].reshape(*x.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


class _Product(torch.autograd.Function):
    """`x @ weight.t()` for a matrix of rows. The input is kept in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_scale, weight_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        x8 = rounded(x, x_scale, E4M3)
        ctx.save_for_backward(x8, x_scale, weight, weight_scale)
        return _multiply(x8, x_scale, rounded(weight, weight_scale, E4M3).t(), weight_scale, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_scale, weight, weight_scale = ctx.saved_tensors
        scale = scale_of(gradient, E5M2)
        gradient8 = rounded(gradient, scale, E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            turned = _turned(rounded(weight, weight_scale, E4M3))
            of_x = _multiply(gradient8, scale, turned, weight_scale)
        if ctx.needs_input_grad[1]:
            of_weight = _multiply(gradient8.t().contiguous(), scale, _turned(x8), x_scale)
        return of_x, of_weight


def scale_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two by which a tensor can be multiplied without an overflow in `dtype`."""
    largest = tensor.abs().amax().float().clamp_min(_LEAST)
    exact = largest.reciprocal() * _LARGEST[dtype]
    return (exact.view(torch.int32) & _EXPONENT).view(torch.float32)


def rounded(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor times its scale, in `dtype`. The product is exact in bf16, because the scale is a power of two."""
    return (tensor * scale.to(tensor.dtype)).to(dtype)


def _turned(matrix: Tensor) -> Tensor:
    """The same matrix with contiguous columns."""
    return matrix.t().contiguous().t()


def _multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, fast: bool = False) -> Tensor:
    """`fast` adds up with fewer bits, which only forward can afford."""
    return scaled_mm(
        a,
        b,
        scale_a=a_scale.reciprocal(),
        scale_b=b_scale.reciprocal(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
