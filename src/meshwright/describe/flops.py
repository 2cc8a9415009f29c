"""The work of one operator: its kind, its floating point operations, and the sizes of a matrix product."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from meshwright.torch_private.operators import flop_registry

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear"))
"""Matrix products whose factors have one dtype."""
_CONVOLUTIONS = (
    *("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "convolution_backward"),
    "_slow_conv2d_forward",
)
_KINDS = dict.fromkeys((*PRODUCTS, "_scaled_mm"), "matmul") | dict.fromkeys(_CONVOLUTIONS, "convolution")
_KINDS |= dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward"), "recurrent")
ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
"""Operators that allocate a tensor and write nothing to it."""


def operator_kind(func: Any) -> str:
    """ "matmul", "attention", "convolution", "recurrent" or "other": the class of kernels that limits its speed."""
    name = func.overloadpacket.__name__
    return "attention" if "attention" in name else _KINDS.get(name, "other")


def product_shape(func: Any, args: Any) -> tuple[int, ...]:
    """(batch, m, n, k) of a matrix product; empty for other operators."""
    name = func.overloadpacket.__name__
    if name not in ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm"):
        return ()
    a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
    batch = a.shape[0] if a.dim() == 3 else 1
    return int(batch), int(a.shape[-2]), int(b.shape[-1]), int(a.shape[-1])


def convolution_shape(func: Any, args: Any, made: list[torch.Tensor]) -> tuple[int, ...]:
    """(groups, m, n, k) of a convolution as products of its groups; empty for other operators."""
    name = func.overloadpacket.__name__
    if name not in ("convolution", "convolution_backward") or not made:
        return ()
    backward = name == "convolution_backward"
    given, weight = args[1:3] if backward else args[:2]
    transposed, groups = args[7 if backward else 6], args[9 if backward else 8]
    # A transposed convolution is the gradient of one that takes its result.
    result = given if transposed else args[0] if backward else made[0]
    rows = result.numel() // result.shape[1]
    return int(groups), int(rows), int(weight.shape[0] // groups), int(weight.numel() // weight.shape[0])


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating point operations by PyTorch's formulas; 0 for an operator without one, which only moves numbers."""
    count = flop_registry.get(func) or flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    if func.overloadpacket.__name__ == "convolution_backward" and args[9] > 1:  # the formula forgets the groups
        shape = convolution_shape(func, args, [args[0]])
        return float(2 * prod(shape) * sum(args[10][:2]))
    if "attention" in func.overloadpacket.__name__:
        args = _with_all_heads(args)
    args = [arg for arg in args if not isinstance(arg, torch.dtype)]  # the formulas do not know `out_dtype`
    return float(count(*args, **kwargs, out_val=result))


def _with_all_heads(args: Any) -> list[Any]:
    """Expand keys and values to the heads of the queries: before PyTorch 2.13 the formulas require that."""
    heads = max((arg.shape[1] for arg in args if _has_heads(arg)), default=0)
    return [arg[:, :1].expand(-1, heads, -1, -1) if _has_heads(arg) and arg.shape[1] < heads else arg for arg in args]


def _has_heads(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() == 4
