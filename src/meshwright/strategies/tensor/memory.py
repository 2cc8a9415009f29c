"""Changes in place of divided tensors, and views of them.

On one process a view shares memory with what it views. Here a view may be a gathered copy, and autograd does not see
inside of the tensor that carries a part. So an operator in place gets new memory, and whoever then reads an older view
of the changed tensor is stopped with a sentence instead of computing with the old value.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import Refused
from meshwright.torch_private.dtensor import local_tensor, set_local_tensor
from meshwright.torch_private.tensors import version_of

_MEMORY, _SEEN, _OUTDATED = "_meshwright_memory", "_meshwright_seen", "_meshwright_outdated"


@dataclass
class _Copy:
    """A view on one process, but a copy here, because it was gathered."""

    tensor: weakref.ref[torch.Tensor]
    alias: torch.Tensor
    """Has the same version, also when the tensor itself is gone."""
    version: int


@dataclass
class _Memory:
    """What a divided tensor and all views of it have in common."""

    changes: int = 0
    is_parameter: bool = False
    copies: list[_Copy] = field(default_factory=list)


def as_parameter(x: DTensor) -> DTensor:
    """A layer's own parameter, which nobody may change meanwhile."""
    _memory(x).is_parameter = True
    return x


def note_views(x: DTensor, views: list[Any]) -> None:
    """These are views of `x` to the model's author: a change of one is a change of `x`."""
    memory = _memory(x)
    for view in views:
        if isinstance(view, DTensor):
            view.__dict__[_MEMORY], view.__dict__[_SEEN] = memory, memory.changes
        else:
            memory.copies.append(_Copy(weakref.ref(view), view.detach(), _version(view)))


def change(x: DTensor, value: DTensor) -> None:
    """Put a value of the same layout in a divided tensor's place, as an operator in place does.

    Into new memory: autograd keeps what operators before it need, and does not see changes of a tensor inside another.
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
            tensor.__dict__[_OUTDATED] = True
    set_local_tensor(x, torch.empty_like(local_tensor(x)))
    x.copy_(value)


def refuse_other_shape(x: DTensor, value: torch.Tensor) -> None:
    """`unsqueeze_` and the like: the carrier's shape is fixed."""
    if value.shape != x.shape:
        raise Refused(
            f"The model changes the shape of a tensor in place, from {tuple(x.shape)} to {tuple(value.shape)}, which "
            "tensor parallelism cannot follow; write x = x.unsqueeze(0) where it says x.unsqueeze_(0), say."
        )


def check_unchanged(x: DTensor) -> None:
    """A change through a view reaches neither a copy nor autograd's record of this tensor: better to stop."""
    memory = x.__dict__.get(_MEMORY)
    if memory is None:
        return
    if memory.changes != x.__dict__[_SEEN] or any(_version(copy.alias) != copy.version for copy in memory.copies):
        raise _refused(x)


def check_current(x: torch.Tensor) -> None:
    """The same for a gathered copy, after the tensor that it should be a view of was changed."""
    if getattr(x, _OUTDATED, False):
        raise _refused(x)


def _refused(x: torch.Tensor) -> Refused:
    return Refused(
        f"The model changes a tensor in place and then reads a view of it, or the other way round (shape "
        f"{tuple(x.shape)}), which tensor parallelism cannot follow; write the change without a view "
        '(`x[...] = value`), or keep the layer that makes the tensor whole: Job(tensor_plan={"its name": "whole"}).'
    )


def _memory(x: DTensor) -> _Memory:
    if _MEMORY not in x.__dict__:
        x.__dict__[_MEMORY], x.__dict__[_SEEN] = _Memory(), 0
    memory: _Memory = x.__dict__[_MEMORY]
    return memory


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else version_of(x)
