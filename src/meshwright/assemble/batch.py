"""How a global batch is cut: first into micro-steps, then each micro-step over the data ranks.

A micro-step is a run of consecutive samples, and so is each rank's part of it. A BatchNorm therefore sees the same
samples on any number of ranks, and all ranks take the same number of micro-steps even in a small last batch. A rank
without samples in a micro-step runs a stand-in whose loss has weight zero.
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
"""A rank's samples of each micro-step. A pipeline runs the micro-steps of one round together; others have one round."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    data: Any
    span: Span
    """Its samples in the global batch; the length is 0 for a stand-in."""
    regular: bool = True
    """Whether the length is known and all samples have one size, so that the loss's weight can follow from it."""

    def to(self, device: torch.device) -> MicroBatch:
        return replace(self, data=to_device(self.data, device))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch."""

    rounds: tuple[tuple[MicroBatch, ...], ...]
    samples: int
    """Number of samples in the global batch."""
    whole: Any = None
    """The global batch itself, if every rank has it."""
    epoch: int | None = None
    """The epoch of its samples, if it comes from the job's data."""
    ends_epoch: int | None = None
    """The number of epochs completed with this batch; None if more batches of the epoch follow."""

    @property
    def pieces(self) -> list[MicroBatch]:
        return list(chain.from_iterable(self.rounds))

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(piece.span for piece in self.pieces)

    @property
    def regular(self) -> bool:
        return all(piece.regular for piece in self.pieces)

    def to(self, device: torch.device) -> Batch:
        return replace(self, rounds=tuple(tuple(piece.to(device) for piece in round_) for round_ in self.rounds))

    def irregular(self) -> Batch:
        """The same batch if nothing is known of the sizes of its samples."""
        rounds = tuple(tuple(replace(piece, regular=False) for piece in round_) for round_ in self.rounds)
        return replace(self, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of every global batch one rank gets."""

    ranks: int = 1
    rank: int = 0
    micro_batch: int | None = None
    """The most samples a rank may have in one micro-step."""
    pipelined: int | None = None
    """Micro-batches that a pipeline runs together; None without a pipeline."""

    def rounds(self, samples: int) -> Rounds:
        if self.pipelined is None:
            return (spans(samples, self.ranks, self.rank, self.micro_batch),)
        return pipeline_rounds(samples, self.ranks, self.rank, self.pipelined)


def micro_steps(samples: int, ranks: int, micro_batch: int | None) -> int:
    """The number of micro-steps such that no rank has more than `micro_batch` samples in one."""
    return 1 if micro_batch is None else max(1, ceil(ceil(samples / ranks) / micro_batch))


def has_stand_ins(samples: int, ranks: int, micro_batch: int | None) -> bool:
    """Whether a rank has no samples in some micro-step."""
    return samples // micro_steps(samples, ranks, micro_batch) < ranks


def spans(samples: int, ranks: int, rank: int, micro_batch: int | None) -> tuple[Span, ...]:
    count = micro_steps(samples, ranks, micro_batch)
    steps = [_near_equal(samples, count, index) for index in range(count)]
    parts = [(step.first, _near_equal(step.length, ranks, rank)) for step in steps]
    return tuple(Span(start + part.first, part.length) for start, part in parts)


def _near_equal(total: int, parts: int, index: int) -> Span:
    """The index-th of near-equal consecutive parts; the first parts are longer by one."""
    size, longer = divmod(total, parts)
    return Span(index * size + min(index, longer), size + (index < longer))


def pipeline_rounds(samples: int, ranks: int, rank: int, count: int) -> Rounds:
    """A pipeline's rounds: `count` micro-batches of one size, then a round of single samples for the remainder.

    The sizes follow from the global batch alone, so all data ranks run the same rounds. A rank without a sample for a
    place in the second round runs a stand-in. With `count` 1 the rank's samples stay together, so BatchNorm sees what
    it sees under a data strategy.
    """
    (own,) = spans(samples, ranks, rank, None)
    if count == 1:
        return ((own,),)
    size = samples // ranks // count
    rounds = []
    if size:
        rounds.append(tuple(Span(own.first + index * size, size) for index in range(count)))
    if ceil(samples / ranks) > size * count:
        remainder = range(size * count, size * count + count)
        rounds.append(tuple(Span(own.first + index, int(index < own.length)) for index in remainder))
    return tuple(rounds)


def part(data: Any, share: Share, cutter: Cutter, *, nominal: int) -> Batch:
    """Cut a rank's part out of a global batch that every rank has whole.

    A batch that is not cut may hide how many samples it has; then the `nominal` number is assumed.
    """
    counted = cutter.count(data)
    if counted == 0:
        raise JobError("A batch without samples was given to step().")
    samples = counted or nominal
    rounds = share.rounds(samples)
    if rounds == ((Span(0, samples),),):
        regular = counted is not None and cutter.is_regular(data)
        return replace(assemble([data], rounds, samples=samples, regular=regular), whole=data)
    return replace(cut(data, rounds, cutter, samples=samples), whole=data)


def cut(data: Any, rounds: Rounds, cutter: Cutter, *, samples: int, first: int = 0) -> Batch:
    """Cut a rank's micro-batches out of `data`, which begins with sample `first` of the global batch."""
    wanted = [(span.first - first, span.length) if span.length else (0, 1) for span in chain.from_iterable(rounds)]
    return assemble(cutter.cut(data, wanted), rounds, samples=samples, regular=cutter.is_regular(data))


def assemble(pieces: Sequence[Any], rounds: Rounds, *, samples: int, regular: bool = True) -> Batch:
    """Make a rank's part from the data of each micro-step."""
    data = iter(pieces)
    made = (tuple(MicroBatch(data=next(data), span=span, regular=regular) for span in round_) for round_ in rounds)
    return Batch(rounds=tuple(made), samples=samples)


def refuse_unlike_shapes(pieces: Sequence[MicroBatch]) -> None:
    """Raise unless all micro-batches have the same shapes, which the stages' receive buffers need."""
    shapes = {tuple(tuple(tensor.shape) for tensor in tensors_of(piece.data)) for piece in pieces}
    if len(shapes) > 1:
        raise JobError(
            "A pipeline runs micro-batches of one shape together, but these have different shapes; pad samples to one "
            "length in Job(collate=...), or use a strategy without pp."
        )
