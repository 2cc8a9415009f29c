"""`fp8`: large linear layers multiply in float8, forward and backward; everything else is as under `bf16`.

Inputs and weights are rounded to e4m3 (3 bits of mantissa), gradients of outputs to e5m2 (2 bits, but a wider range).
Each tensor is first scaled so that its largest element fits. The scale is found in the step, and it is a power of two:
then the same number is rounded alike in any micro-batch and on any rank, except where it underflows. Products
accumulate in fp32 and return bf16.

Operators are plain ones, so that torch.compile can fuse scaling and rounding with their neighbours. Without it they
cost more than the products gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.describe.dtypes import LOW
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.torch_private.modules import AttentionOutput
from meshwright.torch_private.scaled_products import scaled_mm

ALIGNED = 16
"""Float8 products need sides that are multiples of it."""
SMALLEST = 1 << 22
"""Elements of a weight from which rounding is taken to pay for itself: 2048 x 2048. An estimate, not measured."""
CAPABILITY = (8, 9)
"""The compute capability from which GPUs multiply float8 matrices: Ada, Hopper and later."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max}
_LEAST = 2.0**-40
"""The largest element is taken to be at least this, so that the scale of zeros is finite."""
_EXPONENT = 0x7F800000
"""The bits of an fp32 number's exponent."""


def gpus_have_float8() -> bool:
    """Whether this machine's GPUs multiply float8 matrices; True without GPUs, for plans. (CPUs do, though slowly.)"""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= CAPABILITY


def layers_in_float8(model: nn.Module, facts: ModelFacts, strategy: Strategy) -> list[str]:
    """Names of the layers that a strategy multiplies in float8."""
    return float8_layers(model, facts) if strategy.number_format.factors else []


def float8_layers(model: nn.Module, facts: ModelFacts) -> list[str]:
    """Names of the linear layers that multiply in float8.

    The first and the last layers are sensitive, so those before the first block and after the last one stay in bf16; in
    a model without blocks, the first and the last one. So does a weight that is also used elsewhere, as an embedding.
    """
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    linear = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    between = _between_first_and_last(facts, linear)
    return [
        name
        for name, module in linear.items()
        if between(name)
        and _pays(module)
        and uses[id(module._parameters["weight"])] == 1
        and f"{name}.weight" not in facts.read_elsewhere
    ]


def _between_first_and_last(facts: ModelFacts, linear: Collection[str]) -> Callable[[str], bool]:
    """Whether a layer is in a block, or called between the first and the last of the model."""
    called = list(dict.fromkeys(call.name for call in facts.calls))
    ends = {name for name in (*called[:1], *called[-1:]) if name in linear}
    if facts.blocks:
        places = [place for place, name in enumerate(called) if name in facts.blocks]
        inner = set(called[places[0] : places[-1] + 1]) if places else set(facts.blocks)
    else:
        inner = set([name for name in called if name in linear][1:-1])
    return lambda name: name not in ends and (name in inner or any(name.startswith(f"{b}.") for b in facts.blocks))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calls of a module are one product with its own weight."""
    # PyTorch's attention has a subclass whose weight it reads without calling it.
    plain = isinstance(module, nn.Linear) and not isinstance(module, AttentionOutput)
    plain = plain and type(module).forward is nn.Linear.forward
    return plain and module._parameters.get("weight") is not None


def _pays(module: nn.Module) -> bool:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.numel() >= SMALLEST and not any(side % ALIGNED for side in weight.shape)


def multiply_in_float8(model: nn.Module, names: Sequence[str]) -> None:
    """Make calls of these layers multiply in float8."""
    for name in names:
        wrap_forward(model.get_submodule(name), _in_float8)


def _in_float8(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or args[0].dtype not in (torch.float32, *LOW):
        return forward(*args, **kwargs)
    return float8_linear(args[0], module.weight, module.bias)


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
