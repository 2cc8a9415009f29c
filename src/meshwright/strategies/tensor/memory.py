"""In-place changes of divided tensors, and views of them.

In one process a view shares memory with its base. Here a view may be a gathered copy, and autograd does not see inside
the DTensor that carries a part. So an in-place operator writes to new memory, and a later read of an older view raises
instead of returning the old value.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import Refused
from meshwright.strategies.shares import mark_shares
from meshwright.torch_private.dtensor import local_tensor, set_local_tensor
from meshwright.torch_private.tensors import version_of

MEMORY, _SEEN, OUTDATED = "_meshwright_memory", "_meshwright_seen", "_meshwright_outdated"
MADE_FROM = "_meshwright_made_from"
"""The attribute of a block's result that holds the tensor it was made from."""
WHOLE = "_meshwright_whole"
"""The attribute of a fused activation that holds the gathered tensor."""


@dataclass
class _Copy:
    """A gathered copy that would be a view in one process."""

    tensor: weakref.ref[torch.Tensor]
    alias: torch.Tensor
    """Shares the tensor's version, also after the tensor is freed."""
    version: int


@dataclass
class _Memory:
    """State that a divided tensor shares with all its views."""

    changes: int = 0
    is_parameter: bool = False
    copies: list[_Copy] = field(default_factory=list)


def as_parameter(x: DTensor) -> DTensor:
    """Mark a tensor as a layer's parameter, which the model must not change in place."""
    _memory(x).is_parameter = True
    mark_shares(x)
    return x


def note_views(x: DTensor, views: list[Any]) -> None:
    """Record `views` of `x`: in one process, changing one changes `x`."""
    memory = _memory(x)
    for view in views:
        if isinstance(view, DTensor):
            view.__dict__[MEMORY], view.__dict__[_SEEN] = memory, memory.changes
        else:
            memory.copies.append(_Copy(weakref.ref(view), view.detach(), _version(view)))


def change(x: DTensor, value: DTensor) -> None:
    """Change a divided tensor in place to a value of the same layout.

    The value goes to new memory, because autograd keeps the old part for earlier operators and cannot see it change.
    """
    memory = _memory(x)
    if memory.is_parameter:
        raise Refused(
            f"The model changes a parameter of shape {tuple(x.shape)} in its forward, which tensor parallelism cannot "
            'follow; keep its layer whole: Job(tensor_plan={"its name": "whole"}).'
        )
    memory.changes += 1
    x.__dict__[_SEEN] = memory.changes
    for tensor in (copy.tensor() for copy in memory.copies):
        if tensor is not None:
            tensor.__dict__[OUTDATED] = True
    x.__dict__.pop(MADE_FROM, None)
    x.__dict__.pop(WHOLE, None)
    set_local_tensor(x, torch.empty_like(local_tensor(x)))
    x.copy_(value)


def refuse_other_shape(x: DTensor, value: torch.Tensor) -> None:
    """Refuse `unsqueeze_` and the like: a DTensor's shape is fixed."""
    if value.shape != x.shape:
        raise Refused(
            f"The model changes the shape of a tensor in place, from {tuple(x.shape)} to {tuple(value.shape)}, which "
            "tensor parallelism cannot follow; write x = x.unsqueeze(0) where it says x.unsqueeze_(0), say."
        )


def check_unchanged(x: DTensor) -> None:
    """Raise if the tensor was changed through a view, which neither copies nor autograd can see."""
    memory = x.__dict__.get(MEMORY)
    if memory is None:
        return
    if memory.changes != x.__dict__[_SEEN] or any(_version(copy.alias) != copy.version for copy in memory.copies):
        raise _refused(x)


def check_current(x: torch.Tensor) -> None:
    """Raise if the tensor is a gathered copy of a tensor that has changed since."""
    if getattr(x, OUTDATED, False):
        raise _refused(x)


def _refused(x: torch.Tensor) -> Refused:
    return Refused(
        f"The model changes a tensor in place and then reads a view of it, or the other way round (shape "
        f"{tuple(x.shape)}), which tensor parallelism cannot follow; write the change without a view "
        '(`x[...] = value`), or keep the layer that makes the tensor whole: Job(tensor_plan={"its name": "whole"}).'
    )


def _memory(x: DTensor) -> _Memory:
    if MEMORY not in x.__dict__:
        x.__dict__[MEMORY], x.__dict__[_SEEN] = _Memory(), 0
    memory: _Memory = x.__dict__[MEMORY]
    return memory


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else version_of(x)
