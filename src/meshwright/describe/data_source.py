"""What `Job(data=...)` is: a map-style dataset, a stream, or the user's DataLoader over one of them.

A DataLoader is taken apart, because ranks and micro-batches need their own parts of each batch: its dataset, sampler,
batch sampler, collate function, `drop_last` and workers are used, and what cannot be used is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The data of a job, opened."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    is_stream: bool
    """Whether samples can only be read one after the other."""
    build: Callable[[], Any] | None = None
    """Builds the dataset again, if the job gives a builder."""
    loader: DataLoader[Any] | None = None
    """The user's own DataLoader."""

    @property
    def sampler(self) -> Iterable[int] | None:
        """The user's order of samples in an epoch; None for our own permutation."""
        return None if self.loader is None or self.is_stream or self.batch_sampler is not None else self.loader.sampler

    @property
    def batch_sampler(self) -> Iterable[list[int]] | None:
        """The user's own global batches, by index."""
        if self.loader is None or self.is_stream or type(self.loader.batch_sampler) in (BatchSampler, type(None)):
            return None
        return self.loader.batch_sampler

    @property
    def holds_batches(self) -> bool:
        """Whether each item is a whole global batch, as in a DataLoader with `batch_size=None`."""
        return self.loader is not None and self.loader.batch_size is None and self.loader.batch_sampler is None

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch of an epoch is left out."""
        return self.loader is not None and bool(self.loader.drop_last)

    @property
    def workers(self) -> int:
        return 0 if self.loader is None else int(self.loader.num_workers)

    @cached_property
    def may_vary(self) -> bool:
        """Whether samples of later batches may have other sizes than those of the first: they are padded to the
        longest of a batch, or bucketed by length."""
        return self.collate is not default_collate or self.batch_sampler is not None or self.holds_batches

    def samples(self) -> Iterator[Any]:
        """Samples in their plain order, epoch after epoch, for inspection."""
        while True:
            found = False
            for sample in self.epoch():
                found = True
                yield sample
            if not found:
                raise JobError("Job(data=...) has no samples.")

    def epoch(self) -> Iterator[Any]:
        """The items of one epoch in their plain order. A stream is copied: what is read here must not be lost."""
        if self.is_stream:
            return iter(self.copied())
        return (self.dataset[index] for index in range(len(self.dataset)))

    def fresh(self) -> Any:
        """The dataset; if it can be iterated only once, another one."""
        if not is_used_up(self.dataset):
            return self.dataset
        return self.copied()

    def copied(self) -> Any:
        """A second dataset in the same state: built again, or copied."""
        if self.build is None:
            return copy.deepcopy(self.dataset)
        built = self.build()
        return built.dataset if isinstance(built, DataLoader) else built


@contextmanager
def about_evaluation() -> Iterator[None]:
    """Let errors in data name those of the evaluation."""
    try:
        yield
    except JobError as error:
        raise JobError(str(error).replace("Job(data=", "Evaluation(data=")) from None


def open_data(job: Job) -> DataSource:
    """Open a job's data. Raises JobError for what cannot be trained on."""
    data = job.dataset()
    loader = data if isinstance(data, DataLoader) else None
    dataset: Any = data if loader is None else loader.dataset
    if isinstance(dataset, Mapping):
        raise JobError(
            f"Job(data=...) gave a {type(dataset).__name__} with {', '.join(map(repr, list(dataset)[:4]))}; give one "
            'of its entries, such as data["train"].'
        )
    is_map = (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    )
    if not is_map and not hasattr(dataset, "__iter__"):
        raise JobError(
            f"Job(data=...) gave {type(dataset).__name__}, which has neither a length and items nor an iterator; "
            "give a map-style dataset, an iterable one or a DataLoader."
        )
    source = DataSource(
        dataset=dataset,
        collate=job.collate or _collate_of(loader),
        is_stream=not is_map,
        build=None if data is job.data else job.dataset,
        loader=loader,
    )
    _refuse_unusable(source, job)
    return source


def is_used_up(dataset: Any) -> bool:
    """Whether a dataset is an iterator, which gives every sample only once. A Dataset's `__iter__` starts again."""
    return isinstance(dataset, Iterator) and not isinstance(dataset, Dataset)


def _collate_of(loader: DataLoader[Any] | None) -> Callable[[list[Any]], Any]:
    if loader is None or loader.collate_fn is default_convert:  # what PyTorch sets for batch_size=None
        return default_collate
    return loader.collate_fn


def _refuse_unusable(source: DataSource, job: Job) -> None:
    if is_used_up(source.dataset) and source.build is None:
        raise JobError(
            f"Job(data=...) is a {type(source.dataset).__name__}, which can be read only once; give the function that "
            "makes it: Job(data=lambda: ...)."
        )
    loader = source.loader
    if loader is None:
        return
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise JobError(
                "Job(data=...) is a DataLoader with a DistributedSampler, which gives each rank its own samples, but "
                "Meshwright divides every global batch over ranks itself; give shuffle=True instead of the sampler."
            )
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    if size is not None and size != job.global_batch:
        raise JobError(
            f"Job(data=...) is a DataLoader with batch_size={size}, but global_batch={job.global_batch} samples make "
            f"up a step over all ranks; give the DataLoader batch_size={job.global_batch}, or the job "
            f"global_batch={size}."
        )


def shuffles_by_seed(sampler: Any) -> bool:
    """Whether a sampler's order follows from the global generators alone, so that no earlier epoch matters."""
    known = type(sampler).__module__ == RandomSampler.__module__
    return isinstance(sampler, SequentialSampler) or (known and getattr(sampler, "generator", None) is None)


def collate_of(job: Job) -> Callable[[list[Any]], Any]:
    """The job's collate function. The data are opened at its first call, because only training needs them."""
    if job.collate is not None or job.data is None:
        return job.collate or default_collate
    opened = cache(lambda: open_data(job))
    return lambda samples: opened().collate(samples)


def first_batch(job: Job, samples: int) -> Any:
    """A batch of the first samples of the data. Raises what the data raise."""
    source = open_data(job)
    if source.holds_batches:
        raise JobError(
            "Job(data=...) is a DataLoader with batch_size=None, whose items are whole batches; give Job(sample=...), "
            f"so that a batch of {samples} can be made up."
        )
    return source.collate(list(islice(source.samples(), samples)))


def named(error: Exception) -> JobError:
    """An error of the user's data as ours."""
    return error if isinstance(error, JobError) else JobError(f"Job(data=...) raised {one_line(error)}")
