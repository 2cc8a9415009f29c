"""Count the samples of a job's batches, and cut and join batches by samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from typing import Any

from meshwright.describe.batch_layout import CannotCut, Layout, Unknown
from meshwright.describe.data_source import DataSource, collate_of, open_data
from meshwright.describe.learnt_layout import Draws, learn_layout
from meshwright.describe.observe import make_batch
from meshwright.describe.structure import leaves_of, tensors_of
from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job
from meshwright.recording.blueprint import seeded
from meshwright.recording.seeding import seed_torch

SIZES = (2, 3, 5, 3)
"""Sizes of the batches that are compared: three sizes, one of them twice to see what changes at the same size."""


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Seed the random numbers of torch, numpy and Python, and restore their states afterwards."""
    with seeded(seed):
        seed_torch(seed)  # also the generators of GPUs, which are not restored
        yield


class Cutter:
    """Counts and cuts the batches of one job, with `Job(split=...)` or by a layout learnt from a few batches.

    A batch may come from `Job(sample=...)` or from the data; the layout of either is learnt when it is needed.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def count(self, batch: Any) -> int | None:
        """The number of samples in a batch; None if it is unknown."""
        if self._job.split is not None:
            return len(self._split(batch))
        try:
            return self._layout_of(batch).count(batch)
        except CannotCut:
            return None

    def cut(self, batch: Any, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Parts of a batch by ranges (first sample, length). Raises CannotCut, which names the obstacle."""
        if self._job.split is not None:
            samples = self._split(batch)
            return [self._collate(samples[first : first + length]) for first, length in ranges]
        layout, count = self._cuttable(batch)
        return [layout.take(batch, first, length, count) for first, length in ranges]

    def turned(self, batch: Any) -> Any:
        """The same samples in reverse order; the unchanged batch if it cannot be cut."""
        if self._job.split is not None:
            return self._collate(self._split(batch)[::-1])
        try:
            return self._layout_of(batch).turned(batch)
        except CannotCut:
            return batch

    def grown(self, batch: Any, length: int) -> Any:
        """A batch of `length` copies of the first sample. Raises CannotCut, which names the obstacle."""
        if self._job.split is not None:
            return self._collate(self._split(batch)[:1] * length)
        layout, samples = self._cuttable(batch)
        return layout.grown(batch, length, samples)

    def joined(self, batches: list[Any]) -> Any:
        """Several batches joined into one."""
        if self._job.split is not None:
            return self._collate([sample for batch in batches for sample in self._split(batch)])
        return self._layout_of(batches[0]).joined(batches)

    def is_regular(self, batch: Any) -> bool:
        """Whether all samples of batches like this one have the same size."""
        return self.source_of(batch).regular

    @cached_property
    def data_are_regular(self) -> bool:
        """Whether all samples of the data have one size, also that of made-up ones."""
        sources = list(self._sources())
        return all(source.regular and source.size == sources[0].size for source in sources)

    @property
    def cuts_data(self) -> bool:
        """Whether batches of collated data can be cut."""
        return self._job.split is not None or self.data.layout.unknown() is None

    def _cuttable(self, batch: Any) -> tuple[Layout, int]:
        layout = self._layout_of(batch)
        if (unknown := layout.unknown()) is not None:
            raise CannotCut(unknown.path, unknown.why)
        samples = layout.count(batch)
        if samples is None:
            raise CannotCut("batch", "has nothing whose size is the number of samples")
        return layout, samples

    def _layout_of(self, batch: Any) -> Layout:
        return self.source_of(batch).layout

    def source_of(self, batch: Any) -> BatchSource:
        """The source of batches like this one; if there is none, the first source, whose layout names the mismatch."""
        for source in self._sources():
            try:
                source.layout.count(batch)
            except CannotCut:
                continue
            return source
        return next(self._sources())

    def _sources(self) -> Iterator[BatchSource]:
        if self._job.sample is not None:
            yield self.made_up
        if self._job.data is not None:
            yield self.data

    @cached_property
    def opened(self) -> DataSource:
        """The job's data, built once."""
        return open_data(self._job)

    @cached_property
    def made_up(self) -> BatchSource:
        assert self._job.sample is not None
        return inspect_samples(self._job.sample, "Job(sample=...)")

    @cached_property
    def data(self) -> BatchSource:
        """Batches of the data; each holds the samples that follow those of the one before."""
        if self.opened.holds_batches:
            why = "comes whole from a DataLoader with batch_size=None, and Job(sample=...) makes no batches like it"
            return BatchSource(partial(make_batch, self._job), Unknown("batch", why), regular=False)
        samples = self.opened.samples()
        return inspect_samples(lambda count: self._collate(list(islice(samples, count))), "Job(data=..., collate=...)")

    def _collate(self, samples: list[Any]) -> Any:
        return self._collates(samples)

    @cached_property
    def _collates(self) -> Callable[[list[Any]], Any]:
        return collate_of(self._job) if self._job.data is None else self.opened.collate

    def _split(self, batch: Any) -> list[Any]:
        assert self._split_fits
        return self._split_unchecked(batch)

    def _split_unchecked(self, batch: Any) -> list[Any]:
        assert self._job.split is not None
        try:
            samples = list(self._job.split(batch))
        except Exception as error:
            raise JobError(f"Job(split=...) raised {one_line(error)}") from error
        if not samples:
            raise JobError("Job(split=...) returned no samples for a batch; return a list with one entry per sample.")
        return samples

    @cached_property
    def _split_fits(self) -> bool:
        """Check that batches of known sizes are split into as many samples. Raises JobError if not."""
        for seed, samples in enumerate(SIZES[:2]):
            with own_random_numbers(seed):
                batch = make_batch(self._job, samples)
            if (found := len(self._split_unchecked(batch))) != samples:
                raise JobError(
                    f"Job(split=...) returned {found} samples for a batch of {samples}; return one for each."
                )
        return True


@dataclass(frozen=True)
class BatchSource:
    """A source of batches, and what a few of them show."""

    draw: Callable[[int], Any]
    """Makes another batch with a number of samples."""
    layout: Layout
    regular: bool
    """Whether all samples have the same size."""
    size: Sequence[Any] = ()
    """The sizes of one sample, if all have the same."""


def inspect_samples(make: Callable[[int], Any], name: str) -> BatchSource:
    """Make a few batches and compare them."""

    def draw(samples: int) -> Any:
        with own_random_numbers(next(seeds)):
            return make(samples)

    seeds = count()
    try:
        draws: Draws = [(samples, draw(samples)) for samples in SIZES]
    except Exception as error:
        reason = f"could not be inspected: {name} raised {one_line(error)}"
        return BatchSource(draw, Unknown("batch", reason), regular=False)
    layout = learn_layout(draws)
    if layout.unknown() is not None or not _are_alike(layout, draws):
        return BatchSource(draw, layout, regular=False)
    samples, batch = draws[0]
    return BatchSource(draw, layout, regular=True, size=_sizes(layout.take(batch, 0, 1, samples)))


def _are_alike(layout: Layout, draws: Draws) -> bool:
    """Whether all samples have the same sizes."""
    first = _sizes(layout.take(draws[0][1], 0, 1, draws[0][0]))
    singles = (layout.take(batch, index, 1, samples) for samples, batch in draws for index in range(samples))
    return all(_sizes(single) == first for single in singles)


def _sizes(batch: Any) -> list[Any]:
    """All that a loss can know of a batch without reading a tensor's values."""
    tensors = [part for tensor in tensors_of(batch) for part in (tensor.unbind() if tensor.is_nested else [tensor])]
    leaves = leaves_of(batch)
    return [
        len(leaves),
        *(tuple(t.shape) for t in tensors),
        *(leaf for leaf in leaves if isinstance(leaf, int | float)),
    ]
