"""The work of one operator: its kind, its floating point operations, and the sizes of a matrix product."""

from __future__ import annotations

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


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating point operations by PyTorch's formulas; 0 for an operator without one, which only moves numbers."""
    count = flop_registry.get(func) or flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
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
