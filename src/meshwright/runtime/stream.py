"""Read a stream: every rank and every loading process reads all of it, and collates only its own part.

So the samples of a global batch depend on nothing but the stream, and none is lost or repeated when ranks or workers
change. Work that only a sample's owner should do belongs into `Job(collate=...)`. A stream that divides itself by rank
or worker would lose samples: both are hidden from it, and ranks compare what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset

from meshwright.describe.data_source import DataSource, named
from meshwright.environment import alone
from meshwright.facts.position import DataPosition
from meshwright.runtime.checksum import checksum
from meshwright.runtime.order import Order, RankSamples, nothing_given
from meshwright.runtime.seeds import seed_for_sample
from meshwright.runtime.stream_state import opened, restored, state_of
from meshwright.torch_private.loading import hide_worker

_END = object()


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What a loading process hands over for one global batch."""

    part: RankSamples
    pieces: list[Any]
    """The collated micro-batches of this rank."""


@dataclass(frozen=True)
class Failure:
    """Why the data cannot be read on."""

    reason: str


class StreamReader(IterableDataset[Portion | Failure]):
    """This rank's part of every global batch of a stream, in order over all loading processes."""

    def __init__(
        self,
        source: DataSource,
        order: Order,
        collate: Callable[[list[Any], RankSamples], list[Any]],
        start: DataPosition,
        *,
        by_state: bool,
        epochs: int | None = None,
    ) -> None:
        """With `by_state`, positions hold the dataset's own state."""
        self._source, self._order, self._collate, self._start = source, order, collate, start
        self._by_state, self._epochs = by_state, epochs

    def __iter__(self) -> Iterator[Portion | Failure]:
        worker, workers = hide_worker()
        batches = self._batches()
        for number in count():
            try:
                with alone():
                    found = next(batches, None)
                if found is None:
                    return
                if number % workers == worker:
                    yield Portion(part=found[1], pieces=self._collate(*found))
            except Exception as error:
                # The other processes come to the same sample; a collate that raises is known to this one alone.
                yield Failure(str(named(error)))
                return

    def _batches(self) -> Iterator[tuple[list[Any], RankSamples]]:
        """The samples of each global batch, and this rank's part of them as offsets."""
        start = self._start
        # A position that only counts samples is found by reading, through several epochs if need be.
        skip, passed = (start.samples, 0) if start.epoch is None else (start.within, start.samples - start.within)
        for epoch in count(start.epoch or 0):
            if self._epochs is not None and epoch >= self._epochs:
                return
            items, exact = _Items(self._source, epoch, self._order.seed, passed), True
            if skip and start.state is not None:
                items.restore(start)
                skip = 0
            elif skip:
                skip -= items.pass_over(skip)
                if start.epoch is not None:
                    exact, skip = skip == 0 and start.digest in (None, items.digest), 0
            handed = items.within > 0
            while rows := items.read(self._order.global_batch):
                if self._order.keeps(len(rows)):
                    after = self._after(items, epoch)
                    yield rows, self._order.part(range(len(rows)), after, epoch=epoch, exact=exact)
                    handed, exact = True, True
            passed = items.passed
            if not handed:
                raise nothing_given(epoch)

    def _after(self, items: _Items, epoch: int) -> DataPosition:
        if items.ended:
            return DataPosition(samples=items.passed, epoch=epoch + 1)
        state = items.state() if self._by_state else None
        return DataPosition(samples=items.passed, epoch=epoch, within=items.within, digest=items.digest, state=state)


class _Items:
    """One epoch of a stream. The host's generators are seeded for each sample, as they are for map-style data."""

    def __init__(self, source: DataSource, epoch: int, seed: int, passed: int) -> None:
        self._source, self._epoch, self._seed = source, epoch, seed
        self.passed, self.within, self.digest, self.ended = passed, 0, 0, False
        self._opened: tuple[Any, Iterator[Any]] | None = None

    def restore(self, start: DataPosition) -> None:
        """Continue where `start` was taken."""
        assert start.state is not None
        self.passed, self.within, self.digest = start.samples, start.within, start.digest or 0
        self._seed_host()
        self._opened = restored(self._source, start.state, self._epoch)

    def pass_over(self, samples: int) -> int:
        """Read samples that were seen before; returns how many there were."""
        for number in range(samples):
            if self._next() is _END:
                return number
        return samples

    def read(self, samples: int) -> list[Any]:
        """The next samples; fewer if the epoch ends."""
        found: list[Any] = []
        while not self.ended and len(found) < samples:
            if (item := self._next()) is not _END:
                found.append(item)
        return found

    def state(self) -> Any:
        assert self._opened is not None
        return state_of(*self._opened)

    def _next(self) -> Any:
        self._seed_host()
        if self._opened is None:
            self._opened = opened(self._source.fresh(), self._epoch)
        item = next(self._opened[1], _END)
        if item is _END:
            self.ended = True
        else:
            self.digest = checksum([item], self.digest)
            self.passed, self.within = self.passed + 1, self.within + 1
        return item

    def _seed_host(self) -> None:
        seed_for_sample(self._seed, self.passed)
