"""Give each data rank its part of every global batch.

Samples of map-style data are fetched by index (`order.py`); streams are read through by every rank (`stream.py`).
Positions are free of ranks and workers: a checkpoint holds the position after the last batch handed out, not after what
was read ahead.

An epoch ends where the data end. `Batch.epoch` says which epoch a batch belongs to, `Loader.batches(epochs=n)` stops
after the n-th epoch of the run, and `Loader.steps_per_epoch` is None if the end of the data is not known beforehand.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.assemble.batch import Batch, Share, assemble, cut, has_stand_ins, part
from meshwright.describe.data_source import named
from meshwright.describe.samples import Cutter
from meshwright.describe.structure import tensors_of
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.position import DataPosition
from meshwright.launch.preemption import spare_loader
from meshwright.runtime.agreement import Agreement
from meshwright.runtime.epoch_ends import with_ends
from meshwright.runtime.order import Order, RankSamples
from meshwright.runtime.seeds import seed_for_collate, seed_for_sample
from meshwright.runtime.stream import Failure, Portion, StreamReader

__all__ = ["Loader", "Order", "RankSamples"]


_open: WeakSet[Loader] = WeakSet()
"""Loaders that may have loading processes."""


@atexit.register
def _close_all() -> None:
    """Before Python waits for its child processes: loading processes ignore the signal by which it would end them."""
    for loader in list(_open):
        loader.close()


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
        position: int | DataPosition = 0,
        agreement: Agreement | None = None,
        by_state: bool = False,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        """With `weighed`, a few samples are read to find out whether all have one size.

        With an `agreement`, ranks compare every batch. `by_state`: positions in a stream hold its own state. `say` is
        told what the user should know.
        """
        self._cutter = cutter or Cutter(job)
        self._source = self._cutter.opened
        self._whole = order.share if self._source.holds_batches else None
        self._nominal = job.global_batch
        self.order = order if self._whole is None else replace(order, global_batch=1, share=Share(), drop_ragged=False)
        self._drops_ragged = order.drop_ragged
        self.data_position = DataPosition(samples=position) if isinstance(position, int) else position
        self._device, self._workers = device, workers or self._source.workers
        self._agreement, self._by_state, self._say = agreement, by_state, say
        # Micro-batches of a pipeline must have one shape: a padding collate ensures that if it gets them together.
        self._together = self._whole is None and (order.share.pipelined or 1) > 1 and self._cutter.cuts_data
        self._regular = not weighed or (not self._source.may_vary and self._cutter.data_are_regular)
        self._collate = _Collate(
            _only if self._whole else self._source.collate, seed=order.seed, together=self._together
        )
        self._running: tuple[int | None, Generator[tuple[Batch, DataPosition]]] | None = None
        known = self._is_known and self.data_position.epoch is None
        self.completed = self.order.completed(self.position) if known else self.data_position.epoch or 0
        """Epochs completed with the last batch handed out. At the start of a resumed run, one that ended just before is
        not counted if the end of the data is not known beforehand."""

    @property
    def _is_known(self) -> bool:
        return self.order.is_known and self._whole is None

    @property
    def position(self) -> int:
        """Samples passed, counted through all epochs."""
        return self.data_position.samples

    @property
    def steps_per_epoch(self) -> int | None:
        """None if the end of the data is not known beforehand."""
        return self.order.steps

    def steps_until(self, epochs: int) -> int | None:
        """Steps from here to the end of that many epochs of the run; None if unknown."""
        return self.order.batches_until(epochs, self.position) if self._is_known else None

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, *, epochs: int | None = None) -> Iterator[Batch]:
        """Yield batches until `epochs` epochs of the whole run are over, or without end.

        Another call continues after the last batch that was handed out, without reading anything again.
        """
        if self._running is None or self._running[0] != epochs:
            self._running = epochs, self._ahead(epochs)
            _open.add(self)
        running = self._running[1]
        try:
            for batch, self.data_position in running:
                self.completed = batch.ends_epoch or batch.epoch or 0
                yield batch
        except Exception:
            self._running = None
            raise
        self._running = None

    def close(self) -> None:
        """End the loading processes, and iterators of `batches`. Another call of it starts them again."""
        if self._running is not None:
            self._running[1].close()
        self._running = None
        _open.discard(self)

    def _ahead(self, epochs: int | None) -> Generator[tuple[Batch, DataPosition]]:
        batches = with_ends(self._batches(epochs), self._ends if self._is_known else None)
        return _one_ahead(batches, self._device) if self._device.type == "cuda" else batches

    def _ends(self, batch: Batch, after: DataPosition) -> bool:
        return self.order.completed(after.samples) > (batch.epoch or 0)

    def _batches(self, epochs: int | None) -> Iterator[tuple[Batch, DataPosition]]:
        samples = self.data_position.samples
        for portion in self._portions(epochs):
            if not portion.part.exact:
                self._say(_OTHER_SAMPLES)
            batch, after = self._batch(portion.part, portion.pieces), portion.part.after
            if self._whole is not None:
                samples += batch.samples
                after = replace(after, samples=samples)
                if self._drops_ragged and has_stand_ins(batch.samples, self._whole.ranks, self._whole.micro_batch):
                    continue
            yield batch, after

    def _portions(self, epochs: int | None) -> Iterator[Portion]:
        found = iter(self._loading_processes(epochs))
        agreement = self._agreement
        while True:
            try:
                portion = next(found, None)
            except Exception as error:
                if agreement is None:
                    raise
                portion = Failure(str(named(error)))
            if isinstance(portion, Failure):
                if agreement is not None:
                    agreement.settle(digest=None, samples=None, failure=portion.reason)
                raise JobError(portion.reason)
            after = None if portion is None else portion.part.after
            if agreement is not None:
                agreement.settle(digest=after and after.digest, samples=after and after.samples)
            if portion is None:
                return
            yield portion

    def _loading_processes(self, epochs: int | None) -> DataLoader[Any]:
        source, start = self._source, self.data_position
        theirs = source.loader
        options: dict[str, Any] = {}
        if theirs is not None and self._workers:
            options = {"timeout": theirs.timeout, "multiprocessing_context": theirs.multiprocessing_context}
            options |= {"prefetch_factor": theirs.prefetch_factor} if theirs.prefetch_factor else {}
        if source.is_stream:
            read: Any = StreamReader(source, self.order, self._collate, start, by_state=self._by_state, epochs=epochs)
        else:
            read = _Fetched(source.dataset, self._collate, seed=self.order.seed)
            options["sampler"] = self.order.parts(start, epochs=epochs)
        return DataLoader(
            read,
            batch_size=None,
            num_workers=self._workers,
            collate_fn=_identity,
            pin_memory=self._device.type == "cuda",
            persistent_workers=self._workers > 0 and not source.is_stream,
            worker_init_fn=_WorkerStart(None if theirs is None else theirs.worker_init_fn),
            generator=torch.Generator().manual_seed((self.order.seed * 1_000_003 + self.order.share.rank) % 2**63),
            **options,
        )

    def _batch(self, own: RankSamples, pieces: list[Any]) -> Batch:
        if self._whole is not None:
            batch = part(pieces[0], self._whole, self._cutter, nominal=self._nominal)
        elif self._together:
            batch = cut(pieces[0], own.rounds, self._cutter, samples=own.samples, first=own.spans[0].first)
        else:
            batch = assemble(pieces, own.rounds, samples=own.samples)
        if not self._regular:
            batch = batch.irregular()
        return replace(batch, epoch=own.epoch)


_OTHER_SAMPLES = (
    "warning: the data passed over to resume are not those that the saved run had seen: samples may be repeated or "
    "lost. The data changed, or draw random numbers that the seed does not control."
)


class _Collate:
    """Collates each micro-batch of a part by itself, so that no batch has to be cut; with `together`, all as one."""

    def __init__(self, collate: Callable[[list[Any]], Any], *, seed: int, together: bool) -> None:
        self._collate, self._seed, self._together = collate, seed, together

    def groups(self, part: RankSamples) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Indices and places of the samples of each call."""
        if self._together:
            return iter([(part.indices, part.all_places)])
        return zip(part.groups, part.places, strict=True)

    def __call__(self, samples: list[Any], part: RankSamples) -> list[Any]:
        """`samples` are those of the whole batch."""
        return [self.one([samples[index] for index in group], places) for group, places in self.groups(part)]

    def one(self, samples: list[Any], places: tuple[int, ...]) -> Any:
        seed_for_collate(self._seed, places[0])
        return self._collate(samples)


class _Fetched(Dataset[Portion]):
    """A dataset whose items are the portions of map-style data, fetched in a loading process."""

    def __init__(self, dataset: Any, collate: _Collate, *, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitem__(self, part: RankSamples) -> Portion:
        pieces = [
            self._collate.one(self._items(list(group), places), places) for group, places in self._collate.groups(part)
        ]
        return Portion(part=part, pieces=pieces)

    def _items(self, indices: list[int], places: tuple[int, ...]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)  # the batched access that DataLoader uses, too
        if many:
            seed_for_sample(self._seed, places[0])
            return list(many(indices))
        return [self._item(index, place) for index, place in zip(indices, places, strict=True)]

    def _item(self, index: int, place: int) -> Any:
        seed_for_sample(self._seed, place)
        return self._dataset[index]


class _WorkerStart:
    """Sets up a loading process, then calls the user's own `worker_init_fn`."""

    def __init__(self, theirs: Callable[[int], None] | None) -> None:
        self._theirs = theirs

    def __call__(self, worker: int) -> None:
        spare_loader(worker)
        if self._theirs is not None:
            self._theirs(worker)


def _only(samples: list[Any]) -> Any:
    return samples[0]


def _identity(portion: Any) -> Any:
    return portion


def _one_ahead(
    batches: Iterator[tuple[Batch, DataPosition]], device: torch.device
) -> Generator[tuple[Batch, DataPosition]]:
    """Copy the next batch to the GPU on a separate stream while the current one is computed."""
    stream = torch.cuda.Stream(device)

    def start() -> tuple[Batch, DataPosition] | None:
        item = next(batches, None)
        if item is None:
            return None
        with torch.cuda.stream(stream):
            return item[0].to(device), item[1]

    following = start()
    while following is not None:
        torch.cuda.current_stream(device).wait_stream(stream)
        current = following
        for tensor in tensors_of([piece.data for piece in current[0].pieces]):
            tensor.record_stream(torch.cuda.current_stream(device))
        following = start()
        yield current
