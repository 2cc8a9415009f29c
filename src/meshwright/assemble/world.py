"""The processes that train together: a real world of ranks, or a fake one with only this rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.torch_private import modes

outside_of_modes = modes.outside_of_modes
"""Context for making meshes, groups and recordings, which need real or meta tensors, while a step runs on fake ones."""
PATIENCE = timedelta(minutes=10)
"""How long a collective waits for a rank before it gives up."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its ranks."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    device: torch.device
    fake: bool = False
    """Whether the other ranks do not exist: collectives return at once and transfer nothing."""
    weightless: bool = False
    """Whether tensors are fake as well: they have shapes but no values, so no initial weights are made."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def has_weights(self) -> bool:
        """Whether this rank keeps the weights of a model that could not be recorded; other ranks receive them."""
        return self.is_main or self.fake

    @property
    def group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if dist.is_initialized() else None

    def start_sum(self, value: torch.Tensor) -> dist.Work | None:
        """Start an in-place sum over all ranks; call `wait()` on the result before reading the value."""
        return dist.all_reduce(value, group=self.group, async_op=True) if self.ranks > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Gather a small picklable value from every rank on every rank."""
        if self.ranks == 1 or self.fake:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def join(
    *,
    rank: int,
    ranks: int,
    local_rank: int,
    local_ranks: int,
    device: torch.device,
    store: dist.Store | None = None,
    patience: timedelta = PATIENCE,
) -> World:
    """Join the other ranks at `store`, or at the address in torchrun's environment."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=ranks,
            store=store,
            timeout=patience,
            device_id=device if device.type == "cuda" else None,
        )
    return World(rank=rank, ranks=ranks, local_rank=local_rank, local_ranks=local_ranks, device=device)


def alone(device: torch.device) -> World:
    """Make a world of one process, so that strategies can make meshes."""
    with _usual_tracebacks():
        return join(rank=0, ranks=1, local_rank=0, local_ranks=1, device=device, store=dist.HashStore())


def fake_world(ranks: int, device: torch.device, *, rank: int = 0) -> World:
    """Make a world in which only this rank exists: real memory, real compute, no communication."""
    from meshwright.torch_private.fake_world import FakeStore

    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _usual_tracebacks():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return World(rank=rank, ranks=ranks, local_rank=0, local_ranks=1, device=device, fake=True)


@contextmanager
def _usual_tracebacks() -> Iterator[None]:
    """Keep PyTorch from prefixing each line of later tracebacks with a rank: a process may make many such worlds."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
