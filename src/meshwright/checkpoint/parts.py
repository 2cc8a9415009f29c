"""What a rank holds of a tensor, as boxes in global coordinates.

Why boxes: whatever strategies did to a parameter, a rank holds a few boxes of the unsplit tensor. FSDP2 and ZeRO shard
dim 0, tensor parallelism shards any dim and a fused weight in several pieces, DeepSpeed splits wherever a rank's share
ends. A checkpoint that knows only boxes is independent of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.strategies.cuts import Cut, Stretch


@dataclass(frozen=True)
class Part:
    """A box of the tensor and the memory behind it: a view, so writing into it loads it."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class HeldParts:
    """All that this rank holds of one tensor; without parts if it holds nothing of it."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def __add__(self, other: HeldParts) -> HeldParts:
        """Join two copies that one rank holds of the same tensor, as two pipeline stages do."""
        return HeldParts(self.shape, self.dtype, self.parts + other.parts)


State = dict[str, HeldParts]
"""What a rank holds of a run's tensors, by their names in the checkpoint."""


def held_parts(tensor: torch.Tensor, cut: Cut | Stretch | None = None) -> HeldParts:
    """The boxes of a rank's tensor: a DTensor on the data axis, whose parameter `cut` may also divide."""
    if isinstance(cut, Stretch):
        return HeldParts(cut.shape, tensor.dtype, tuple(_stretch_parts(tensor.detach(), cut)))
    local, offsets = _own_box(tensor)
    shape = tuple(tensor.shape)
    if cut is None:
        return HeldParts(shape, tensor.dtype, _without_empty((Part(offsets, local),), shape))
    parts = tuple(_parts_of_whole(local, offsets, cut, shape))
    whole = cut.whole_shape(shape)
    return HeldParts(whole, tensor.dtype, _without_empty(parts, whole))


def add_parts(state: State, key: str, held: HeldParts) -> None:
    """Add parts of a tensor to a state, which may already hold others."""
    state[key] = state[key] + held if key in state else held


def _stretch_parts(flat: torch.Tensor, stretch: Stretch) -> Iterator[Part]:
    """Boxes of the tensor that cover consecutive elements."""
    at = 0
    for offsets, sizes in stretch.boxes(flat.numel()):
        yield Part(offsets, flat.narrow(0, at, prod(sizes)).view(sizes))
        at += prod(sizes)


def _own_box(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's local tensor of a DTensor and its offsets; a plain tensor is returned whole."""
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(offsets)
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "a rank holds only tensors of meshes that it is part of"
    for placement, ranks, at in zip(tensor.placements, tensor.device_mesh.shape, place, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            start, sizes[dim] = chunk(sizes[dim], ranks, at)
            offsets[dim] += start
        else:
            assert isinstance(placement, Replicate), f"{placement} has no box"
    with torch.no_grad():  # gives the memory itself; detaching a DTensor costs more than all the rest
        local = tensor.to_local()
    assert list(local.shape) == sizes, f"a part of {tuple(local.shape)} where {sizes} was expected"
    return local, tuple(offsets)


def chunk(length: int, count: int, at: int) -> tuple[int, int]:
    """Start and length of one of `count` chunks, as `torch.chunk` and FSDP2 make them: the last may be shorter."""
    size = -(-length // count)
    start = min(at * size, length)
    return start, min(size, length - start)


def _parts_of_whole(local: torch.Tensor, offsets: tuple[int, ...], cut: Cut, shape: tuple[int, ...]) -> Iterator[Part]:
    """Map a box of this rank's shard on a model axis to boxes of the whole parameter."""
    dim = cut.dim
    first, last = offsets[dim], offsets[dim] + local.shape[dim]
    for begin, end, place in cut.spans(shape[dim]):
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            at = place + start - begin
            yield Part((*offsets[:dim], at, *offsets[dim + 1 :]), local.narrow(dim, start - first, stop - start))


def _without_empty(parts: tuple[Part, ...], shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Drop empty parts, which uneven shards leave on the last ranks; but keep parts of a tensor without elements."""
    return parts if prod(shape) == 0 else tuple(part for part in parts if part.tensor.numel())
