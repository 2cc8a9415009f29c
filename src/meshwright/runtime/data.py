"""Give each data rank its part of every global batch.

The order of an epoch is a permutation drawn from (seed, epoch) alone, so every strategy and world size sees the same
global batches. A position is a global sample index, counted through all epochs: from it alone the loader goes on at
the exact next sample, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from meshwright.build.batch import Batch, Span, has_stand_ins, spans
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.runtime.preemption import spare_loader


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which samples make up which global batch, and which of them are one rank's."""

    samples: int
    """In the data set."""
    global_batch: int
    seed: int
    ranks: int = 1
    rank: int = 0
    micro_batch: int | None = None
    drop_ragged: bool = False
    """Whether to leave out a last batch in which some rank would have nothing of its own (BatchNorm sees stand-ins)."""

    def __post_init__(self) -> None:
        if self.samples == 0:
            raise JobError("Job(data=...) has no samples.")
        if self.drop_ragged and has_stand_ins(min(self.samples, self.global_batch), self.ranks, self.micro_batch):
            raise JobError(
                f"A batch of {min(self.samples, self.global_batch)} leaves one of {self.ranks} ranks without samples "
                "in some micro-step, and BatchNorm must not see stand-ins; use fewer ranks, or more samples in a batch."
            )

    def parts(self, position: int) -> Iterator[Part]:
        """This rank's parts from `position` on, epoch after epoch, without end."""
        epoch, start = divmod(position, self.samples)
        while True:
            order = self._permutation(epoch)
            for first in range(start, self.samples, self.global_batch):
                batch = order[first : first + self.global_batch]
                if not (self.drop_ragged and has_stand_ins(len(batch), self.ranks, self.micro_batch)):
                    yield self._part(batch, epoch * self.samples + first)
            epoch, start = epoch + 1, 0

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator).tolist()

    def _part(self, batch: list[int], position: int) -> Part:
        own = spans(len(batch), self.ranks, self.rank, self.micro_batch)
        indices = [index for span in own for index in batch[span.first : span.first + span.length]] or batch[:1]
        return Part(indices=indices, spans=own, samples=len(batch), end=position + len(batch))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's part of one global batch, as indices into the data set."""

    indices: list[int]
    spans: tuple[Span, ...]
    samples: int
    end: int
    """The position after this batch."""


class Loader:
    """Batches of one rank from a position on. `position` moves as batches are handed out."""

    def __init__(
        self,
        job: Job,
        order: Order,
        *,
        device: torch.device,
        dataset: Dataset[Any] | None = None,
        workers: int = 0,
        position: int = 0,
    ) -> None:
        self.order, self.position = order, position
        self._collate, self._device, self._workers = job.collate, device, workers
        self._dataset = job.dataset() if dataset is None else dataset

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        if self._device.type == "cuda":
            batches = _one_ahead(batches, self._device)
        for batch, end in batches:
            self.position = end
            yield batch

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        start = self.position
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=_Indices(self.order, start),
            num_workers=self._workers,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            persistent_workers=self._workers > 0,
            worker_init_fn=spare_loader,
            generator=torch.Generator().manual_seed((self.order.seed * 1_000_003 + self.order.rank) % 2**63),
        )
        for part, data in zip(self.order.parts(start), loader, strict=False):
            yield Batch(data=data, samples=part.samples, spans=part.spans), part.end


class _Indices:
    def __init__(self, order: Order, position: int) -> None:
        self._order, self._position = order, position

    def __iter__(self) -> Iterator[list[int]]:
        return (part.indices for part in self._order.parts(self._position))


def _one_ahead(batches: Iterator[tuple[Batch, int]], device: torch.device) -> Iterator[tuple[Batch, int]]:
    """Copy the next batch to the GPU on a stream of its own while this one is computed with."""
    stream = torch.cuda.Stream(device)

    def start(item: tuple[Batch, int]) -> tuple[Batch, int]:
        with torch.cuda.stream(stream):
            return item[0].to(device), item[1]

    following = start(next(batches))
    while True:
        torch.cuda.current_stream(device).wait_stream(stream)
        current = following
        for leaf in tree_leaves(current[0].data):
            if torch.is_tensor(leaf):
                leaf.record_stream(torch.cuda.current_stream(device))
        following = start(next(batches))
        yield current
