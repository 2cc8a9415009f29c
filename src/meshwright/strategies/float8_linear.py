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

from meshwright.strategies.float8_casts import rounded, rounded_and_turned, turned
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
    product: Tensor = _Product.apply(rows, weight, weight.requires_grad)
    result = product[:count].reshape(*x.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


class _Product(torch.autograd.Function):
    """`x @ weight.t()` for a matrix of rows. The input is kept in float8, turned as backward needs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, trained: bool) -> Tensor:
        x_scale, weight_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        if trained:
            x8, x8_turned = rounded_and_turned(x, x_scale, E4M3)
        else:
            x8, x8_turned = rounded(x, x_scale, E4M3), None
        ctx.save_for_backward(x8_turned, x_scale, weight, weight_scale)
        return _multiply(x8, x_scale, rounded(weight, weight_scale, E4M3).t(), weight_scale, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x8_turned, x_scale, weight, weight_scale = ctx.saved_tensors
        scale = scale_of(gradient, E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            gradient8, gradient8_turned = rounded_and_turned(gradient, scale, E5M2)
            of_weight = _multiply(gradient8_turned, scale, x8_turned.t(), x_scale)
        else:
            gradient8 = rounded(gradient, scale, E5M2)
        if ctx.needs_input_grad[0]:
            of_x = _multiply(gradient8, scale, turned(weight, weight_scale, E4M3).t(), weight_scale)
        return of_x, of_weight, None


def scale_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two by which a tensor can be multiplied without an overflow in `dtype`."""
    largest = tensor.abs().amax().float().clamp_min(_LEAST)
    exact = largest.reciprocal() * _LARGEST[dtype]
    return (exact.view(torch.int32) & _EXPONENT).view(torch.float32)


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
