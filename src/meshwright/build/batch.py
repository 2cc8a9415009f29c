"""How a global batch is cut: over data ranks first, over micro-batches then.

Rank r takes the r-th of near-equal consecutive parts, and cuts it into as many near-equal micro-batches as every other
rank, so that all ranks meet in the same collectives even when the last batch of an epoch is small. A rank or micro-batch
left without samples runs a stand-in whose loss counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch."""

    data: Any
    """This rank's samples; one stand-in sample where `own` is 0."""
    samples: int
    """Samples of the whole global batch."""
    first: int
    """Where this rank's part begins in the global batch."""
    own: int
    """How many of the samples are this rank's."""

    def to(self, device: torch.device) -> Batch:
        return Batch(data=to_device(self.data, device), samples=self.samples, first=self.first, own=self.own)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes."""

    data: Any
    first: int
    """Where it begins in the global batch."""
    samples: int
    """Samples that count: 0 for a stand-in."""


def span(total: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of the index-th of near-equal parts; the first ones are one longer."""
    size, longer = divmod(total, parts)
    return index * size + min(index, longer), size + (index < longer)


def micro_batches_of(samples: int, ranks: int, micro_batch: int | None) -> int:
    """How many micro-batches every rank runs for a global batch of `samples`."""
    largest = -(-samples // ranks)
    return 1 if micro_batch is None else max(1, -(-largest // micro_batch))


def has_stand_ins(samples: int, ranks: int, micro_batch: int | None) -> bool:
    """Whether some rank would run a micro-batch without samples."""
    return samples // ranks < micro_batches_of(samples, ranks, micro_batch)


def count_samples(data: Any) -> int:
    """Samples in a batch: dim 0 of its first tensor that has dims."""
    for leaf in tree_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise JobError("A batch must hold at least one tensor whose first dim counts the samples.")


def take(data: Any, start: int, length: int) -> Any:
    """Some samples of a batch: every tensor whose first dim counts the samples is cut, all else is kept whole."""
    samples = count_samples(data)
    leaves, tree = tree_flatten(data)
    cut = [
        leaf[start : start + length] if torch.is_tensor(leaf) and leaf.dim() > 0 and leaf.shape[0] == samples else leaf
        for leaf in leaves
    ]
    return tree_unflatten(cut, tree)


def part(data: Any, ranks: int, rank: int) -> Batch:
    """The part of `rank` in a global batch that every rank has whole."""
    samples = count_samples(data)
    first, own = span(samples, ranks, rank)
    return Batch(data=take(data, first if own else 0, own or 1), samples=samples, first=first, own=own)


def micro_batches(batch: Batch, ranks: int, micro_batch: int | None) -> Iterator[MicroBatch]:
    """The micro-batches of one rank's part."""
    count = micro_batches_of(batch.samples, ranks, micro_batch)
    for index in range(count):
        start, length = span(batch.own, count, index)
        data = batch.data if count == 1 else take(batch.data, start if length else 0, length or 1)
        yield MicroBatch(data=data, first=batch.first + start, samples=length)


def to_device(data: Any, device: torch.device) -> Any:
    leaves, tree = tree_flatten(data)
    moved = [leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    return tree_unflatten(moved, tree)
