"""How a parameter is cut over the ranks of a model axis.

Note: cutting without the model's help. The module keeps its class and its names; only the parameter is replaced by a
plain tensor of the local size, so every data strategy and optimizer takes it like any other. The cut alone knows which
part it is: it takes the part of an initial weight and joins parts for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.parts import joined


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One parameter, divided evenly along a dim over the ranks of a one-dimensional mesh."""

    dim: int
    mesh: DeviceMesh
    pieces: int = 1
    """Pieces of a fused parameter (query, key and value in one), each divided separately."""

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size // self.ranks if dim == self.dim else size for dim, size in enumerate(shape))

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size * self.ranks if dim == self.dim else size for dim, size in enumerate(shape))

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part."""
        pieces = whole.chunk(self.pieces, self.dim)
        own = [piece.chunk(self.ranks, self.dim)[self.mesh.get_local_rank()] for piece in pieces]
        return torch.cat(own, self.dim) if self.pieces > 1 else own[0].clone()

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor on every rank of the axis. All of them must call it."""
        return joined(local, self.dim, self.pieces, self.mesh)

    def spans(self, length: int) -> Iterator[tuple[int, int, int]]:
        """The ranges of the dim, `length` long, that this rank has: (start, stop, start in the whole)."""
        own, at = length // self.pieces, self.mesh.get_local_rank()  # parts are even
        for piece in range(self.pieces):
            yield piece * own, (piece + 1) * own, (piece * self.ranks + at) * own


@dataclass(frozen=True, kw_only=True)
class Owned(Cut):
    """A parameter that one rank of the mesh has whole. The others have an empty tensor under its name."""

    owner: int
    shape: tuple[int, ...]
    """Of the parameter, which has at least one dim."""
    dim: int = 0

    @property
    def is_here(self) -> bool:
        return self.mesh.get_local_rank() == self.owner

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.is_here else (0, *shape[1:])

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.shape

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.clone() if self.is_here else whole.new_empty(self.local_shape(tuple(whole.shape)))

    def join(self, local: torch.Tensor) -> torch.Tensor:
        whole = local.contiguous() if self.is_here else local.new_empty(self.shape)
        dist.broadcast(whole, group_src=self.owner, group=self.mesh.get_group())
        return whole

    def spans(self, length: int) -> Iterator[tuple[int, int, int]]:
        yield 0, length, 0


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A range of a parameter's flattened elements, which a rank holds as a tensor of one dim."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int

    def boxes(self, length: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the boxes that make up `length` elements, in their order."""
        yield from _boxes(self.shape, self.start, self.start + length)


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, at: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Part of the first row, whole rows, and part of the last row; parts of rows are split recursively."""
    if start >= stop:
        return
    if not shape:
        yield at, (1,) * len(at)
        return
    ones, row = (1,) * len(at), prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _boxes(shape[1:], start - last * row, stop - last * row, (*at, last))
        return
    if start < first * row:
        yield from _boxes(shape[1:], start - (first - 1) * row, row, (*at, first - 1))
    if first < last:
        yield (*at, first, *(0 for _ in shape[1:])), (*ones, last - first, *shape[1:])
    yield from _boxes(shape[1:], 0, stop - last * row, (*at, last))


Cuts = dict[str, Cut]
"""By the parameter's name in the unsplit model, tied parameters by each name. Parameters not listed are whole."""


def narrow(module: nn.Module, name: str, cut: Cut, narrowed: dict[int, nn.Parameter]) -> None:
    """Replace a module's parameter by one of the local size on the meta device.

    `narrowed` maps whole parameters to their replacements, so that tied ones stay tied.
    """
    whole = module._parameters[name]
    assert whole is not None and whole.is_meta
    if id(whole) not in narrowed:
        empty = torch.empty(cut.local_shape(tuple(whole.shape)), dtype=whole.dtype, device="meta")
        narrowed[id(whole)] = nn.Parameter(empty, requires_grad=whole.requires_grad)
    module._parameters[name] = narrowed[id(whole)]
