"""A user's DataLoader, of which each data rank gets its part of every batch.

Batches stay those of one process: the same samples in the same order, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from meshwright.assemble.world import World
from meshwright.errors import JobError
from meshwright.runtime.loop_order import small_messages


def divide_loader(loader: DataLoader[Any], *, rank: int, ranks: int, world: World) -> DataLoader[Any]:
    """A loader like the user's that gives this data rank its part of each batch. All ranks call it.

    A sampler that draws from torch's generator follows rank 0's, so that ranks need no common seed.
    """
    if not isinstance(loader, DataLoader):
        raise JobError(f"model.divide takes a torch DataLoader, but it got {type(loader).__name__}.")
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    }
    options |= {"generator": loader.generator, "persistent_workers": loader.persistent_workers}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    if isinstance(loader.dataset, IterableDataset):
        size = _even_size(loader.batch_size, ranks)
        part = _PartOfStream(loader.dataset, size, rank=rank, ranks=ranks, drop_last=loader.drop_last)
        return DataLoader(part, batch_size=size // ranks, drop_last=loader.drop_last, **options)
    if loader.batch_sampler is None:
        raise JobError("model.divide cannot divide a DataLoader with batch_size=None: its samples are whole batches.")
    batches = _PartOfBatches(loader.batch_sampler, rank=rank, ranks=ranks, world=world)
    made: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=batches, **options)
    object.__setattr__(made, "sampler", loader.sampler)  # for `loader.sampler.set_epoch(...)`; DataLoader forbids it
    return made


def _even_size(batch_size: int | None, ranks: int) -> int:
    if batch_size is None or batch_size % ranks:
        raise JobError(
            f"model.divide cannot divide batches of {batch_size} samples of an IterableDataset over {ranks} data "
            "ranks; give the DataLoader a batch_size that is a multiple of them."
        )
    return batch_size


class _PartOfBatches(BatchSampler):
    """One rank's part of each batch of indices, in one piece."""

    def __init__(self, batches: Any, *, rank: int, ranks: int, world: World) -> None:
        self.batches, self._rank, self._ranks, self._world = batches, rank, ranks, world
        if world.ranks > 1:
            small_messages(world)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batches)
        first = self._first(batches)
        if first is None:
            return
        yield self._part(first)
        for batch in batches:
            yield self._part(list(batch))

    def _first(self, batches: Iterator[Any]) -> list[Any] | None:
        """The first batch, for which a sampler draws its order: on every rank with rank 0's random state."""
        if self._world.ranks == 1:
            return next(batches, None)
        own = torch.get_rng_state()
        state = own.clone()
        dist.broadcast(state, 0, small_messages(self._world))
        torch.set_rng_state(state)
        first = next(batches, None)
        if not torch.equal(own, state):
            torch.set_rng_state(own)  # of a rank that was seeded otherwise; those seeded alike stay so
        found = self._world.gather(None if first is None else list(first))
        if any(other != found[0] for other in found):
            raise JobError(
                "The samplers of several ranks give different first batches, so samples would be lost and repeated; "
                "give the DataLoader a sampler that draws from torch's generator, or seed it alike on all ranks. A "
                "DistributedSampler divides the data itself: leave model.divide out, or the sampler."
            )
        return first

    def _part(self, batch: list[int]) -> list[int]:
        if len(batch) < self._ranks:
            raise JobError(
                f"The last batch has {len(batch)} samples for {self._ranks} data ranks; give the DataLoader "
                "drop_last=True, or another batch_size."
            )
        each, more = divmod(len(batch), self._ranks)
        first = self._rank * each + min(self._rank, more)
        return batch[first : first + each + (self._rank < more)]


class _PartOfStream(IterableDataset[Any]):
    """One rank's part of each batch of a stream. Every rank reads the whole stream and keeps its samples."""

    def __init__(self, stream: Any, batch: int, *, rank: int, ranks: int, drop_last: bool) -> None:
        self._stream, self._batch, self._rank, self._ranks, self._drops = stream, batch, rank, ranks, drop_last

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stream":
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for sample in self._stream:
            held.append(sample)
            if len(held) == self._batch:
                yield from self._part(held)
                held = []
        if held and not self._drops:
            if len(held) % self._ranks:
                worker = get_worker_info()
                whose = "" if worker is None else f" of worker {worker.id}"
                raise JobError(
                    f"The last batch{whose} has {len(held)} samples, which {self._ranks} data ranks cannot divide "
                    "evenly; give the DataLoader drop_last=True."
                )
            yield from self._part(held)

    def _part(self, batch: list[Any]) -> list[Any]:
        each = len(batch) // self._ranks
        return batch[self._rank * each : (self._rank + 1) * each]
