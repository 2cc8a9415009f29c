"""Floating point operations of one operator, by PyTorch's own formulas."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.torch_private.operators import flop_registry


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """0 for what has no formula: what only moves numbers."""
    count = flop_registry.get(func) or flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    if "attention" in func.overloadpacket.__name__:
        args = _with_all_heads(args)
    return float(count(*args, **kwargs, out_val=result))


def _with_all_heads(args: Any) -> list[Any]:
    """Keys and values with as many heads as queries: before PyTorch 2.13 the formulas know no other attention."""
    heads = max((arg.shape[1] for arg in args if _has_heads(arg)), default=0)
    return [arg[:, :1].expand(-1, heads, -1, -1) if _has_heads(arg) and arg.shape[1] < heads else arg for arg in args]


def _has_heads(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() == 4
