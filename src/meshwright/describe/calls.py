"""What following a model gives: the calls of its modules, what each returns and reads, and what feeds which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.torch_private.trees import TreeSpec

NUMBERS = (bool, int, float)
CONSTANTS = (type(None), *NUMBERS, str, torch.dtype, torch.device)
GLUE = -1
"""Stands for the code between the calls where a call is meant."""


@dataclass(frozen=True)
class Value:
    """A tensor in the output of a watched call."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Inside:
    """Made inside of a watched call and read outside of it by another way than its output, as through a cache."""

    call: int


Source = Value | Inside | str
"""Where a tensor comes from through glue: a call's output, a call's inside, or a parameter by name."""


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor that a call returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class InputLeaf:
    """One of the call's own inputs, returned as it came: its place among the leaves of (args, kwargs)."""

    place: int


@dataclass(frozen=True)
class ConstantLeaf:
    value: Any


@dataclass(frozen=True)
class StrangeLeaf:
    """Something that cannot be made up where the call does not run."""

    kind: str


Leaf = TensorLeaf | InputLeaf | ConstantLeaf | StrangeLeaf


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a watched module."""

    name: str
    needs: frozenset[Source]
    """What its inputs come from."""
    reads: frozenset[str]
    """Parameters that are read in it."""
    leaves: tuple[Leaf, ...]
    """What it returned, by the leaves of `tree`; after these, the inputs that it changed in place."""
    tree: TreeSpec
    flops: float = 0.0
    """Of its forward pass."""
    wrote: tuple[int, ...] = ()
    """Places of the inputs that it changed in place, among the leaves of (args, kwargs)."""
    changed: bool = False
    """Whether one of its leaves is changed in place later."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The watched calls of one forward pass and loss, in their order."""

    calls: tuple[Call, ...]
    needs: frozenset[Source]
    """What the loss comes from."""
    looked: bool = False
    """Whether the glue looked at values, of the batch or of what calls gave: they may decide what it does next."""
    shaped: str | None = None
    """The last call before the glue made a shape of values, as `x[mask]` does; "" for none before."""
    hidden: str | None = None
    """A call whose gradient goes through an autograd function around it, as under `checkpoint(use_reentrant=True)`."""
    moved: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Buffers that the pass changed, each with the calls that did; `GLUE` where none did."""
    changes_batch: bool = False
    """Whether the batch itself is changed in place."""

    def readers(self, parameter: str) -> list[int]:
        """The calls that read a parameter, in them or in the glue before; the number of calls stands for the loss."""
        steps = [call.reads | call.needs for call in self.calls]
        return [index for index, sources in enumerate([*steps, self.needs]) if parameter in sources]
