"""The order of samples that a user's sampler or batch sampler gives, epoch by epoch.

An epoch's order must follow from the seed and the epoch, so that all ranks draw the same one and a resumed run draws it
again. PyTorch's samplers draw from the global generators, which are seeded for the epoch, or from a generator of their
own, which is started again from its own seed; then the order is that of the plain DataLoader. A user's own class may
remember earlier epochs, so those are drawn again first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from meshwright.describe.data_source import DataSource, shuffles_by_seed
from meshwright.runtime.seeds import OwnRandom


class UserOrder:
    """The epochs of a DataLoader's sampler or batch sampler."""

    def __init__(self, source: DataSource, *, seed: int, chunk: int) -> None:
        """`chunk` indices are drawn at a time."""
        assert source.loader is not None
        self._source, self._seed = source, seed
        self._chunk = 1 if source.batch_sampler is not None else chunk
        self._drawn: Any = source.batch_sampler if source.batch_sampler is not None else source.sampler
        self._ready: int | None = None
        """The epoch that can be drawn next; None before the first, and in the middle of one."""
        owners = (source.loader, self._drawn, getattr(self._drawn, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        self._generators = {id(one): one for one in found if isinstance(one, torch.Generator)}.values()

    @property
    def gives_batches(self) -> bool:
        """Whether each batch is chosen by the user."""
        return self._source.batch_sampler is not None

    @property
    def length(self) -> int | None:
        """The number of indices or batches of an epoch, if known."""
        try:
            return len(self._drawn)
        except (TypeError, NotImplementedError):
            return None

    def batches(self, epoch: int, within: int) -> Iterator[list[int]]:
        """The batches of an epoch; first, if any, the `within` samples that were passed before, as one batch."""
        items = self._items(epoch)
        if not self.gives_batches:
            indices = (int(index) for index in items)
            if within:
                yield list(islice(indices, within))
            while batch := list(islice(indices, self._chunk)):
                yield batch
            return
        passed: list[int] = []
        for batch in items:
            found = [int(index) for index in batch]
            if len(passed) >= within:
                if found:
                    yield found
                continue
            passed += found
            if len(passed) >= within:
                yield passed[:within]
                if passed[within:]:
                    yield passed[within:]

    def _items(self, epoch: int) -> Iterator[Any]:
        self._prepare(epoch)
        self._ready = None
        yield from self._drawn_items(epoch)
        self._ready = epoch + 1

    def _prepare(self, epoch: int) -> None:
        """Bring samplers that remember earlier epochs to the start of this one."""
        samplers = (self._drawn, getattr(self._drawn, "sampler", None))
        if not self._generators and all(one is None or shuffles_by_seed(one) for one in samplers):
            return
        if self._ready is None or self._ready > epoch:
            self._ready = 0
            for generator in self._generators:
                generator.manual_seed(generator.initial_seed())
        for earlier in range(self._ready, epoch):
            for _ in self._drawn_items(earlier):
                pass

    def _drawn_items(self, epoch: int) -> Iterator[Any]:
        own = OwnRandom(self._seed * 1_000_003 + epoch)
        with own:
            for owner in (self._drawn, getattr(self._drawn, "sampler", None)):
                if callable(set_epoch := getattr(owner, "set_epoch", None)):
                    set_epoch(epoch)
            if self._source.loader is not None and self._source.loader.generator is not None:
                torch.empty((), dtype=torch.int64).random_(
                    generator=self._source.loader.generator
                )  # as DataLoader does
            items = iter(self._drawn)
        while True:
            with own:
                chunk = list(islice(items, self._chunk))
            if not chunk:
                return
            yield from chunk
