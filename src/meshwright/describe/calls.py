"""The data flow of a forward pass: the calls of watched modules, what each reads and returns, and what feeds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.torch_private.trees import TreeSpec

NUMBERS = (bool, int, float)
CONSTANTS = (type(None), *NUMBERS, str, torch.dtype, torch.device)
GLUE = -1
"""Represents the code between the calls, in place of the index of a call."""


@dataclass(frozen=True)
class Value:
    """A tensor in the output of a watched call."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Inside:
    """A tensor made inside a watched call and read elsewhere, but not from its output: through a cache, say."""

    call: int


Source = Value | Inside | str
"""Where a tensor comes from: a call's output, a call's inside, or a parameter by name."""


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor that a call returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLeaf:
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class InputLeaf:
    """An input that the call returned unchanged: its place among the leaves of (args, kwargs)."""

    place: int


@dataclass(frozen=True)
class ConstantLeaf:
    value: Any


@dataclass(frozen=True)
class StrangeLeaf:
    """A value that cannot be replaced where the call does not run."""

    kind: str


Leaf = TensorLeaf | InputLeaf | ConstantLeaf | StrangeLeaf


def leaf_of(value: Any, places: dict[int, int], *, looked: bool) -> Leaf:
    """Describe a returned value. `places` are those of the inputs by id; `looked` if the call read values."""
    if isinstance(value, NUMBERS) and looked:
        return StrangeLeaf("number that may depend on the data")
    if isinstance(value, CONSTANTS):
        return ConstantLeaf(value)
    if id(value) in places:
        return InputLeaf(places[id(value)])
    return TensorLeaf.of(value) if isinstance(value, torch.Tensor) else StrangeLeaf(type(value).__name__)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a watched module."""

    name: str
    needs: frozenset[Source]
    """The sources of its inputs."""
    reads: frozenset[str]
    """Parameters that are read in it."""
    leaves: tuple[Leaf, ...]
    """What it returned, by the leaves of `tree`, followed by the inputs that it changed in place."""
    tree: TreeSpec
    flops: float = 0.0
    """In its forward pass."""
    wrote: tuple[int, ...] = ()
    """Places of the inputs that it changed in place, among the leaves of (args, kwargs)."""
    changed: bool = False
    """Whether one of its leaves is changed in place later."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The watched calls of one forward pass and loss, in their order."""

    calls: tuple[Call, ...]
    needs: frozenset[Source]
    """The sources of the loss."""
    looked: bool = False
    """Whether the glue read values of the batch or of calls' outputs: they may decide what runs next."""
    shaped: str | None = None
    """The last call before the glue made a shape that depends on values, as `x[mask]` does; "" if there is none."""
    hidden: str | None = None
    """A call whose gradient goes through an autograd function around it, as under `checkpoint(use_reentrant=True)`."""
    moved: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Buffers that the pass changed, each with the calls that changed it, or `GLUE`."""
    changes_batch: bool = False
    """Whether the pass changed the batch in place."""

    def readers(self, parameter: str) -> list[int]:
        """The calls that read a parameter, in them or in the glue before them; `len(calls)` means the loss."""
        steps = [call.reads | call.needs for call in self.calls]
        return [index for index, sources in enumerate([*steps, self.needs]) if parameter in sources]
