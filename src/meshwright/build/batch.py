"""How a global batch is cut: into micro-steps first, each of them over the data ranks then.

A micro-step is consecutive samples of the global batch, and so is each rank's part of it. So what meets in one
BatchNorm is the same on any number of ranks, and all ranks take the same number of micro-steps even when the last
batch of an epoch is small. A rank left without samples in a micro-step runs a stand-in whose loss counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.errors import JobError


@dataclass(frozen=True)
class Span:
    """Consecutive samples of a global batch."""

    first: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch."""

    data: Any
    """This rank's samples, micro-step after micro-step; one stand-in sample where it has none."""
    samples: int
    """Samples of the whole global batch."""
    spans: tuple[Span, ...]
    """What this rank has of each micro-step."""
    of_samples: tuple[bool, ...] | None = None
    """Which leaves of the data have a row for each sample; None: those of as many rows as this rank has samples."""

    def to(self, device: torch.device) -> Batch:
        return replace(self, data=to_device(self.data, device))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes."""

    data: Any
    span: Span
    """Where it lies in the global batch; its length is 0 for a stand-in."""


def micro_steps(samples: int, ranks: int, micro_batch: int | None) -> int:
    """How many micro-steps a global batch of `samples` takes, so that no rank has more than `micro_batch` in one."""
    return 1 if micro_batch is None else max(1, ceil(ceil(samples / ranks) / micro_batch))


def has_stand_ins(samples: int, ranks: int, micro_batch: int | None) -> bool:
    """Whether some rank would run a micro-batch without samples."""
    return samples // micro_steps(samples, ranks, micro_batch) < ranks


def spans(samples: int, ranks: int, rank: int, micro_batch: int | None) -> tuple[Span, ...]:
    """What `rank` has of each micro-step."""
    count = micro_steps(samples, ranks, micro_batch)
    steps = [_near_equal(samples, count, index) for index in range(count)]
    parts = [(step.first, _near_equal(step.length, ranks, rank)) for step in steps]
    return tuple(Span(start + part.first, part.length) for start, part in parts)


def _near_equal(total: int, parts: int, index: int) -> Span:
    """The index-th of near-equal consecutive parts; the first ones are one longer."""
    size, longer = divmod(total, parts)
    return Span(index * size + min(index, longer), size + (index < longer))


def count_samples(data: Any) -> int:
    """Samples in a batch: dim 0 of its first tensor that has dims."""
    for leaf in tree_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise JobError("A batch must hold at least one tensor whose first dim counts the samples.")


def find_leaves_of_samples(data: Any) -> tuple[bool, ...]:
    """Which leaves have a row for each sample: tensors of as many rows as the first."""
    samples = count_samples(data)
    return tuple(torch.is_tensor(x) and x.dim() > 0 and x.shape[0] == samples for x in tree_leaves(data))


def take(data: Any, start: int, length: int, of_samples: tuple[bool, ...]) -> Any:
    """Some samples of a batch; what has no row for each sample is kept whole."""
    leaves, tree = tree_flatten(data)
    cut = [leaf[start : start + length] if yes else leaf for leaf, yes in zip(leaves, of_samples, strict=True)]
    return tree_unflatten(cut, tree)


def turn_round(data: Any) -> Any:
    """The same samples, last first."""
    leaves, tree = tree_flatten(data)
    kept = zip(leaves, find_leaves_of_samples(data), strict=True)
    return tree_unflatten([leaf.flip(0) if of_samples else leaf for leaf, of_samples in kept], tree)


def part(data: Any, ranks: int, rank: int, micro_batch: int | None) -> Batch:
    """The part of `rank` in a global batch that every rank has whole."""
    samples, of_samples = count_samples(data), find_leaves_of_samples(data)
    own = spans(samples, ranks, rank, micro_batch)
    pieces = [take(data, span.first, span.length, of_samples) for span in own if span.length]
    pieces = pieces or [take(data, 0, 1, of_samples)]
    return Batch(data=_join(pieces, of_samples), samples=samples, spans=own, of_samples=of_samples)


def micro_batches(batch: Batch) -> Iterator[MicroBatch]:
    """What each forward pass of this rank takes."""
    of_samples = batch.of_samples or find_leaves_of_samples(batch.data)
    start = 0
    for span in batch.spans:
        whole = len(batch.spans) == 1
        data = batch.data if whole else take(batch.data, start if span.length else 0, span.length or 1, of_samples)
        yield MicroBatch(data=data, span=span)
        start += span.length


def rounds(batch: Batch, ranks: int, count: int) -> list[list[MicroBatch]]:
    """What a pipeline takes: `count` micro-batches of one size, and where that does not divide as many single samples.

    The sizes follow from the global batch alone, so all data ranks take the same rounds; one that has no sample left
    for a place in the second round runs a stand-in. A single micro-batch is all that the rank has, in one round: so
    BatchNorm sees what it sees under a data strategy.
    """
    if count == 1:
        return [list(micro_batches(batch))]
    of_samples = batch.of_samples or find_leaves_of_samples(batch.data)
    first, own = batch.spans[0].first, batch.spans[0].length
    size = batch.samples // ranks // count
    found = []
    if size:
        found.append([_piece(batch.data, first, index * size, size, of_samples) for index in range(count)])
    if ceil(batch.samples / ranks) > size * count:
        left = range(size * count, size * count + count)
        found.append([_piece(batch.data, first, index, int(index < own), of_samples) for index in left])
    return found


def _piece(data: Any, first: int, start: int, length: int, of_samples: tuple[bool, ...]) -> MicroBatch:
    taken = take(data, start if length else 0, length or 1, of_samples)
    return MicroBatch(data=taken, span=Span(first + start, length))


def _join(pieces: list[Any], of_samples: tuple[bool, ...]) -> Any:
    """Batches one after another: the inverse of `take`."""
    if len(pieces) == 1:
        return pieces[0]
    flat = [tree_flatten(piece) for piece in pieces]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [torch.cat(column) if yes else column[0] for column, yes in zip(columns, of_samples, strict=True)]
    return tree_unflatten(joined, flat[0][1])


def to_device(data: Any, device: torch.device) -> Any:
    leaves, tree = tree_flatten(data)
    moved = [leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    return tree_unflatten(moved, tree)
