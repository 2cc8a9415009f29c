"""Ranks agree on each batch of data that they read separately: same samples, same end, and no rank waits for another
that has failed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.assemble.axes import host_group
from meshwright.assemble.world import World
from meshwright.errors import JobError


class Agreement:
    """Compares batches of all ranks, one small message on the host for each. All ranks must create one together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = None if world.fake else host_group(world, "data")

    def settle(self, *, digest: int | None, samples: int | None, failure: str | None = None) -> None:
        """Raise JobError on all ranks if one failed or read other data. `samples` were passed; None at the end."""
        if self._world.ranks == 1 or self._world.fake:
            if failure is not None:
                raise JobError(failure)
            return
        seen = [digest or 0, -1 if samples is None else samples]
        bounds = torch.tensor([failure is not None, *seen, *(-value for value in seen)], dtype=torch.int64)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._group)
        failed, *most = bounds.tolist()
        if failed:
            self._raise_first(failure)
        if most[:2] != [-value for value in most[2:]]:
            raise JobError(
                "Ranks read different samples from Job(data=...): it divides its samples by rank, or draws random "
                "numbers that the seed does not control. Meshwright divides every global batch over ranks itself; give "
                "the whole data on every rank, in an order that follows from the seed."
            )

    def _raise_first(self, failure: str | None) -> None:
        found: list[str | None] = [None] * self._world.ranks
        dist.all_gather_object(found, failure, group=self._group)
        rank, reason = next((rank, reason) for rank, reason in enumerate(found) if reason is not None)
        raise JobError(f"{reason.rstrip('.')} (on rank {rank}).")
