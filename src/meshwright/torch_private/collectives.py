"""Process groups as operators name them, functional collectives, and DDP's buckets (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FUNCTIONAL = "_c10d_functional"
"""The namespace of collective operators that return new tensors."""
COLLECTIVES = ("c10d", FUNCTIONAL)
"""Namespaces of collective operators."""

_FUNCTIONAL = torch.ops._c10d_functional
_GATHER, _SCATTER = _FUNCTIONAL.all_gather_into_tensor.default, _FUNCTIONAL.reduce_scatter_tensor.default
_EXCHANGE = _FUNCTIONAL.all_to_all_single.default
_SUM, _WAIT = _FUNCTIONAL.all_reduce.default, _FUNCTIONAL.wait_tensor.default


def _sent(operator: Any, *args: Any) -> Tensor:
    """What a collective returns, once it is there.

    The operators' rules for autograd are Python functions that take as long as the operators. Who calls this has rules
    of their own.
    """
    if torch.compiler.is_compiling():
        return _WAIT(operator(*args))  # type: ignore[no-any-return]
    with torch._C._AutoDispatchBelowAutograd():
        return _WAIT(operator(*args))  # type: ignore[no-any-return]


def gather_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """The ranks' tensors below each other, [ranks, ...]. Less on the host than `torch.distributed`, and compilable."""
    own = x.contiguous()
    return _sent(_GATHER, own if own.dim() else own.view(1), ranks, group).view(ranks, *own.shape)


def sum_row(x: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's row of the sum over ranks of [ranks, ...]."""
    shares = x.contiguous()
    return _sent(_SCATTER, shares, "sum", ranks, group).view(shares.shape[1:])


def sum_over(x: Tensor, group: str) -> Tensor:
    """The sum over ranks, as a new tensor."""
    return _sent(_SUM, x.contiguous(), "sum", group)


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """The rows that the ranks have for this one: `sent` rows go to each rank, and `received` come from each."""
    return _WAIT(_EXCHANGE(x.contiguous(), list(received), list(sent), group))  # type: ignore[no-any-return]


FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES
"""Size of DDP's first bucket."""

assign_buckets: Callable[[list[Tensor], list[int]], tuple[list[list[int]], list[int]]]
assign_buckets = dist._compute_bucket_assignment_by_size
"""Groups tensors into DDP's buckets, given a limit for the first bucket and one for the others."""


def group_given_as(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of a collective names or wraps; None for another argument."""
    if isinstance(argument, str):
        return _group_named(argument)
    if isinstance(argument, Tensor) or type(argument).__name__ not in ("ScriptObject", "FakeScriptObject"):
        return None
    try:
        return dist.ProcessGroup.unbox(getattr(argument, "real_obj", argument))
    except Exception:  # another object: the operator of a reduction
        return None


def _group_named(name: str) -> dist.ProcessGroup | None:
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a str at run time
    except RuntimeError:  # another word: the kind of a reduction
        return None
