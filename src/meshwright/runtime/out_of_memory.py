"""Turn a rank's out-of-memory error into an `OutOfMemory` that says what the rank held."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.errors import OutOfMemory
from meshwright.facts.memory_report import MemoryReport
from meshwright.runtime.measure import REST, held_states
from meshwright.runtime.memory_limit import find_limit, memory_usage
from meshwright.units import GIB, KIB, MIB

_ON_CPU = re.compile(r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes")
_ON_GPU = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_NO_THREAD = "can't start new thread"
_STACKS = 64 * MIB
"""Room for a few threads' stacks: with less than this left, a thread that cannot start lacks memory."""
_UNITS = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "bytes": 1}


@contextmanager
def reporting_memory(world: World, trainer: Callable[[], Trainer | None]) -> Iterator[None]:
    """Raise `OutOfMemory` if the block runs out of memory. Enter it before the model is made.

    `trainer` returns the trainer, or None as long as there is none.
    """
    before = memory_usage(world.device)
    try:
        yield
    except Exception as error:
        cause = memory_error(error)
        if cause is None and not (_NO_THREAD in str(error) and _is_full(world)):
            raise
        report = _report(world, before, trainer(), None if cause is None else asked_bytes(cause))
        # Without its frames, which hold the tensors that are too many.
        raise OutOfMemory(report.sentences(), report.to_json()) from None


def memory_error(error: BaseException | None) -> BaseException | None:
    """The error of this chain that says that memory is exhausted; None if there is none."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or _ON_CPU.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


def asked_bytes(error: BaseException) -> int | None:
    """The size of the allocation that failed, if the message has it."""
    text = str(error)
    if found := _ON_CPU.search(text):
        return int(found[1])
    if found := _ON_GPU.search(text):
        return round(float(found[1]) * _UNITS[found[2]])
    return None


def _is_full(world: World) -> bool:
    usage = memory_usage(world.device)
    limit = find_limit(world.device, usage, local_ranks=world.local_ranks)
    return limit.limit - usage[limit.counted] < _STACKS


def _report(world: World, before: Mapping[str, int], trainer: Trainer | None, asked: int | None) -> MemoryReport:
    now = memory_usage(world.device)
    limit = find_limit(world.device, now, local_ranks=world.local_ranks)
    used, base = now[limit.counted], before[limit.counted]
    held: dict[str, int] = {}
    if trainer is not None:
        with suppress(Exception):  # a step that broke off may have left the engine in between states
            held = dict(held_states(trainer).memory)
    if world.device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(world.device), torch.cuda.memory_reserved(world.device)
        held = {**held, REST: max(0, allocated - sum(held.values())), "allocator": reserved - allocated}
    elif held:
        held[REST] = max(0, used - base - sum(held.values()))
    return MemoryReport(
        rank=world.rank,
        step=0 if trainer is None else trainer.steps + 1,
        limit=limit.limit,
        limited_by=limit.name,
        used=used,
        base=base,
        asked=asked,
        held=held,
    )
