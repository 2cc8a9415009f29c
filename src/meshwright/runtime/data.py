"""Give each data rank its part of every global batch.

The order of an epoch is a permutation drawn from (seed, epoch) alone, so every strategy and world size sees the same
global batches. A position is a global sample index, counted through all epochs: it is all that the loader needs to
continue at the exact next sample, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from meshwright.assemble.batch import Batch, Rounds, Share, Span, assemble, cut, has_stand_ins
from meshwright.assemble.passes import seed_host
from meshwright.describe.samples import Cutter
from meshwright.describe.structure import tensors_of
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.launch.preemption import spare_loader

_SAMPLE, _COLLATE = 0, 1  # purposes that generators are seeded for


@dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of each global batch, and one rank's part of them."""

    samples: int
    """Size of the data set."""
    global_batch: int
    seed: int
    share: Share = field(default_factory=Share)
    """One rank's part of each global batch."""
    drop_ragged: bool = False
    """Whether to skip a last batch that leaves some rank without samples (BatchNorm must not see stand-ins)."""
    shuffled: bool = True
    """Evaluation reads samples in order."""

    def __post_init__(self) -> None:
        if self.samples == 0:
            raise JobError("Job(data=...) has no samples.")
        if self.drop_ragged and self._has_stand_ins(min(self.samples, self.global_batch)):
            raise JobError(
                f"A batch of {min(self.samples, self.global_batch)} leaves one of {self.share.ranks} ranks without "
                "samples in some micro-step, and BatchNorm must not see stand-ins; use fewer ranks, or more samples in "
                "a batch."
            )

    def _has_stand_ins(self, samples: int) -> bool:
        return has_stand_ins(samples, self.share.ranks, self.share.micro_batch)

    def parts(self, position: int) -> Iterator[RankSamples]:
        """Yield this rank's parts from `position` on, epoch after epoch, without end."""
        epoch, start = divmod(position, self.samples)
        while True:
            order = self._permutation(epoch)
            for first in range(start, self.samples, self.global_batch):
                batch = order[first : first + self.global_batch]
                if not self._drops(len(batch)):
                    yield self._part(batch, epoch * self.samples + first)
            epoch, start = epoch + 1, 0

    def completed(self, position: int) -> int:
        """Epochs that are complete at a position; a last batch that is skipped is no part of its epoch."""
        epoch, start = divmod(position, self.samples)
        rest = self.samples - start
        return epoch + (start > 0 and rest < self.global_batch and self._drops(rest))

    def batches_until(self, epochs: int, position: int = 0) -> int:
        """The number of batches from a position to the end of that many epochs."""
        done, start = divmod(position, self.samples)
        each = self._batches_of(self.samples)
        return max(0, (epochs - done - 1) * each + self._batches_of(self.samples - start)) if epochs > done else 0

    def _batches_of(self, samples: int) -> int:
        whole, rest = divmod(samples, self.global_batch)
        return whole + bool(rest and not self._drops(rest))

    def _drops(self, samples: int) -> bool:
        return self.drop_ragged and self._has_stand_ins(samples)

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffled:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator).tolist()

    def _part(self, batch: list[int], position: int) -> RankSamples:
        rounds = self.share.rounds(len(batch))
        own = [batch[span.first : span.first + span.length] for round_ in rounds for span in round_]
        stand_in = next((indices[:1] for indices in own if indices), batch[:1])
        groups = tuple(tuple(indices or stand_in) for indices in own)
        return RankSamples(groups=groups, rounds=rounds, samples=len(batch), end=position + len(batch))


@dataclass(frozen=True, kw_only=True)
class RankSamples:
    """One rank's part of one global batch, as indices into the data set."""

    groups: tuple[tuple[int, ...], ...]
    """The samples of each micro-batch; one stand-in where the rank has none."""
    rounds: Rounds
    samples: int
    end: int
    """The position after this batch."""

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(chain.from_iterable(self.rounds))

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each micro-batch's samples, counted through all epochs."""
        firsts = [self.end - self.samples + span.first for span in self.spans]
        return tuple(tuple(range(first, first + len(g))) for first, g in zip(firsts, self.groups, strict=True))

    @property
    def indices(self) -> tuple[int, ...]:
        """All samples of this rank; one stand-in where it has none."""
        return self._own(self.groups)

    @property
    def all_places(self) -> tuple[int, ...]:
        """Positions of the samples in `indices`."""
        return self._own(self.places)

    def _own(self, groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        own = [one for group, span in zip(groups, self.spans, strict=True) if span.length for one in group]
        return tuple(own) or groups[0]


class Loader:
    """Iterates over one rank's batches. `position` advances with every batch handed out."""

    def __init__(
        self,
        job: Job,
        order: Order,
        *,
        device: torch.device,
        cutter: Cutter | None = None,
        weighed: bool = True,
        workers: int = 0,
        position: int = 0,
    ) -> None:
        """With `weighed`, a few samples are read to find out whether all have one size."""
        self.order, self.position = order, position
        self._device, self._workers, self._cutter = device, workers, cutter or Cutter(job)
        # Micro-batches of a pipeline must have one shape: a padding collate ensures that if it gets them together.
        self._together = (order.share.pipelined or 1) > 1 and self._cutter.cuts_data
        self._regular = not weighed or self._cutter.data.regular
        collate = job.collate or default_collate
        self._collated = _Collated(self._cutter.dataset, collate, seed=order.seed, together=self._together)

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
            self._collated,
            batch_size=None,
            sampler=self.order.parts(start),
            num_workers=self._workers,
            collate_fn=_identity,
            pin_memory=self._device.type == "cuda",
            persistent_workers=self._workers > 0,
            worker_init_fn=spare_loader,
            generator=torch.Generator().manual_seed((self.order.seed * 1_000_003 + self.order.share.rank) % 2**63),
        )
        for part, pieces in zip(self.order.parts(start), loader, strict=False):
            before, after = self.order.completed(part.end - part.samples), self.order.completed(part.end)
            batch = self._batch(part, pieces)
            yield replace(batch, ends_epoch=after) if after > before else batch, part.end

    def _batch(self, part: RankSamples, pieces: list[Any]) -> Batch:
        if self._together:
            return cut(pieces[0], part.rounds, self._cutter, samples=part.samples, first=part.spans[0].first)
        return assemble(pieces, part.rounds, samples=part.samples, regular=self._regular)


class _Collated(Dataset[list[Any]]):
    """A data set whose items are a part's collated micro-batches, so that no batch has to be cut.

    Generators are seeded for each sample from the seed and the sample's position, and for each collate from its first
    sample's position. Augmentation is therefore the same on any number of ranks and workers, and after a resume.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], *, seed: int, together: bool) -> None:
        self._dataset, self._collate, self._seed, self._together = dataset, collate, seed, together

    def __getitem__(self, part: RankSamples) -> list[Any]:
        groups = (part.indices,) if self._together else part.groups
        places = (part.all_places,) if self._together else part.places
        return [self._collated(list(group), of) for group, of in zip(groups, places, strict=True)]

    def _collated(self, indices: list[int], places: tuple[int, ...]) -> Any:
        items = self._items(indices, places)
        self._seed_for(places[0], _COLLATE)
        return self._collate(items)

    def _items(self, indices: list[int], places: tuple[int, ...]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)  # the batched access that DataLoader uses, too
        if many:
            self._seed_for(places[0], _SAMPLE)
            return list(many(indices))
        return [self._item(index, place) for index, place in zip(indices, places, strict=True)]

    def _item(self, index: int, place: int) -> Any:
        self._seed_for(place, _SAMPLE)
        return self._dataset[index]

    def _seed_for(self, place: int, what: int) -> None:
        seed_host((((self._seed * 1_000_003 + place) * 1_000_003) + what) % 2**63)


def _identity(pieces: list[Any]) -> list[Any]:
    return pieces


def _one_ahead(batches: Iterator[tuple[Batch, int]], device: torch.device) -> Iterator[tuple[Batch, int]]:
    """Copy the next batch to the GPU on a separate stream while the current one is computed."""
    stream = torch.cuda.Stream(device)

    def start(item: tuple[Batch, int]) -> tuple[Batch, int]:
        with torch.cuda.stream(stream):
            return item[0].to(device), item[1]

    following = start(next(batches))
    while True:
        torch.cuda.current_stream(device).wait_stream(stream)
        current = following
        for tensor in tensors_of([piece.data for piece in current[0].pieces]):
            tensor.record_stream(torch.cuda.current_stream(device))
        following = start(next(batches))
        yield current
