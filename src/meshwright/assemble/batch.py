"""How a global batch is cut: into micro-steps first, each of them over the data ranks then.

A micro-step is consecutive samples of the global batch, and so is each rank's part of it. So what meets in one
BatchNorm is the same on any number of ranks, and all ranks take the same number of micro-steps even when the last
batch of an epoch is small. A rank left without samples in a micro-step runs a stand-in whose loss counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Any

import torch

from meshwright.describe.samples import Cutter
from meshwright.describe.structure import tensors_of, to_device
from meshwright.errors import JobError


@dataclass(frozen=True)
class Span:
    """Consecutive samples of a global batch."""

    first: int
    length: int


Rounds = tuple[tuple[Span, ...], ...]
"""What a rank has of each micro-step. A pipeline takes those of one round together; without one there is one round."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes."""

    data: Any
    span: Span
    """Where it lies in the global batch; its length is 0 for a stand-in."""
    regular: bool = True
    """Whether that length is known and samples are all of one size, so that the loss's weight may follow from it."""

    def to(self, device: torch.device) -> MicroBatch:
        return replace(self, data=to_device(self.data, device))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch."""

    rounds: tuple[tuple[MicroBatch, ...], ...]
    samples: int
    """Samples of the whole global batch."""
    whole: Any = None
    """The global batch itself, where every rank has it."""

    @property
    def pieces(self) -> list[MicroBatch]:
        """What each forward pass of this rank takes."""
        return list(chain.from_iterable(self.rounds))

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(piece.span for piece in self.pieces)

    @property
    def regular(self) -> bool:
        return all(piece.regular for piece in self.pieces)

    def to(self, device: torch.device) -> Batch:
        return replace(self, rounds=tuple(tuple(piece.to(device) for piece in round_) for round_ in self.rounds))


@dataclass(frozen=True, kw_only=True)
class Share:
    """How one rank's part of every global batch is found."""

    ranks: int = 1
    rank: int = 0
    micro_batch: int | None = None
    """How many samples a rank may have in one micro-step."""
    pipelined: int | None = None
    """Micro-batches that a pipeline has under way together; None: no pipeline."""

    def rounds(self, samples: int) -> Rounds:
        """What the rank has of each micro-step of a global batch."""
        if self.pipelined is None:
            return (spans(samples, self.ranks, self.rank, self.micro_batch),)
        return pipeline_rounds(samples, self.ranks, self.rank, self.pipelined)


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


def pipeline_rounds(samples: int, ranks: int, rank: int, count: int) -> Rounds:
    """What a pipeline takes: `count` micro-batches of one size, and where that does not divide as many single samples.

    The sizes follow from the global batch alone, so all data ranks take the same rounds; one that has no sample left
    for a place in the second round runs a stand-in. A single micro-batch is all that the rank has, in one round: so
    BatchNorm sees what it sees under a data strategy.
    """
    (own,) = spans(samples, ranks, rank, None)
    if count == 1:
        return ((own,),)
    size = samples // ranks // count
    found = []
    if size:
        found.append(tuple(Span(own.first + index * size, size) for index in range(count)))
    if ceil(samples / ranks) > size * count:
        left = range(size * count, size * count + count)
        found.append(tuple(Span(own.first + index, int(index < own.length)) for index in left))
    return tuple(found)


def part(data: Any, share: Share, cutter: Cutter, *, nominal: int) -> Batch:
    """A rank's part of a global batch that every rank has whole.

    A batch that is not cut need not tell its samples; then it is taken to have the `nominal` number.
    """
    samples = cutter.count(data)
    if samples == 0:
        raise JobError("A batch without samples was given to step().")
    rounds = share.rounds(samples or nominal)
    if rounds == ((Span(0, samples or nominal),),):
        regular = samples is not None and cutter.is_regular(data)
        found = assemble([data], rounds, samples=samples or nominal, regular=regular)
    else:
        found = cut(data, rounds, cutter, samples=samples or nominal)
    return replace(found, whole=data)


def cut(data: Any, rounds: Rounds, cutter: Cutter, *, samples: int, first: int = 0) -> Batch:
    """A rank's micro-batches, from what begins with the sample `first` of a global batch."""
    wanted = [(span.first - first, span.length) if span.length else (0, 1) for span in chain.from_iterable(rounds)]
    return assemble(cutter.cut(data, wanted), rounds, samples=samples, regular=cutter.is_regular(data))


def assemble(pieces: Sequence[Any], rounds: Rounds, *, samples: int, regular: bool = True) -> Batch:
    """A rank's part from the data of each micro-step."""
    data = iter(pieces)

    def made(span: Span) -> MicroBatch:
        return MicroBatch(data=next(data), span=span, regular=regular)

    return Batch(rounds=tuple(tuple(made(span) for span in round_) for round_ in rounds), samples=samples)


def refuse_unlike_shapes(pieces: Sequence[MicroBatch]) -> None:
    """Stages receive micro-batches into tensors of one shape."""
    shapes = {tuple(tuple(tensor.shape) for tensor in tensors_of(piece.data)) for piece in pieces}
    if len(shapes) > 1:
        raise JobError(
            "Micro-batches that a pipeline runs together have tensors of other shapes; pad samples to one length in "
            "Job(collate=...), or use a strategy without pp."
        )
