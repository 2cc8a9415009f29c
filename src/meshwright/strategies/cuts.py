"""How parameters lie over the ranks of a model axis: each rank holds plain tensors, and a cut says which part they are.

Parameters stay plain tensors of the local size, so every data strategy lays itself over them as over any model; the
cut puts initial weights in their place and brings the whole back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.collectives import joined


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One parameter, divided evenly along a dim over the ranks of a one-dimensional mesh."""

    dim: int
    mesh: DeviceMesh
    pieces: int = 1
    """A fused parameter (query, key and value in one) is so many pieces one after another, each divided by itself."""

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size // self.ranks if dim == self.dim else size for dim, size in enumerate(shape))

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, as a tensor of its own."""
        pieces = whole.chunk(self.pieces, self.dim)
        own = [piece.chunk(self.ranks, self.dim)[self.mesh.get_local_rank()] for piece in pieces]
        return torch.cat(own, self.dim) if self.pieces > 1 else own[0].clone()

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """The whole, on every rank of the axis; all of them must take part."""
        return joined(local, self.dim, self.pieces, self.mesh)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive elements of a parameter, counted row after row; a rank holds them as a tensor of one dim."""

    shape: tuple[int, ...]
    """Of the whole."""
    start: int

    def boxes(self, length: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the boxes that so many elements make up, in their order."""
        yield from _boxes(self.shape, self.start, self.start + length)


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, at: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A part of the first row, whole rows, and a part of the last one, each part likewise in its own row."""
    if start >= stop:
        return
    if not shape:
        yield at, (1,) * len(at)
        return
    ones, row = (1,) * len(at), prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all of it lies within one row
        yield from _boxes(shape[1:], start - last * row, stop - last * row, (*at, last))
        return
    if start < first * row:
        yield from _boxes(shape[1:], start - (first - 1) * row, row, (*at, first - 1))
    if first < last:
        yield (*at, first, *(0 for _ in shape[1:])), (*ones, last - first, *shape[1:])
    yield from _boxes(shape[1:], 0, stop - last * row, (*at, last))


Cuts = dict[str, Cut]
"""By the parameter's name in the unsplit model; every name of a tied one. Parameters that are not named are whole."""


def narrow(module: nn.Module, name: str, cut: Cut, narrowed: dict[int, nn.Parameter]) -> None:
    """Put a parameter of the local size, on the meta device, in a module's place for the whole one.

    `narrowed` remembers what stands for which whole parameter, so that tied ones stay tied.
    """
    whole = module._parameters[name]
    assert whole is not None and whole.is_meta
    if id(whole) not in narrowed:
        empty = torch.empty(cut.local_shape(tuple(whole.shape)), dtype=whole.dtype, device="meta")
        narrowed[id(whole)] = nn.Parameter(empty, requires_grad=whole.requires_grad)
    module._parameters[name] = narrowed[id(whole)]
