"""Make a schedule from its name and size, `make("1f1b", 4, 8)`; and which numbers of micro-batches it can run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from meshwright.errors import Refused
from meshwright.schedules.action import Slot
from meshwright.schedules.dependencies import SlotTimes, start_times
from meshwright.schedules.families import Family, find_family
from meshwright.schedules.schedule import Schedule, ScheduleShape


def make(name: str, ranks: int, micro_batches: int, *, virtual: int | None = None) -> Schedule:
    """The schedule that PyTorch's class of that name runs; `virtual` is the stages per rank, 2 for interleaved."""
    family = find_family(name)
    if reason := refuse(name, ranks, micro_batches):
        raise Refused(reason)
    shape = ScheduleShape(ranks=ranks, virtual=_stages_per_rank(name, family, virtual), micro_batches=micro_batches)
    return Schedule(
        name=name,
        ranks=shape.ranks,
        virtual=shape.virtual,
        micro_batches=shape.micro_batches,
        placement=family.placement,
        rows=lay_out([family.order(rank, shape) for rank in range(ranks)], shape.stages),
    )


def lay_out(orders: Sequence[Sequence[Slot]], stages: int) -> tuple[tuple[Slot, ...], ...]:
    """Rows of equal length with each slot at its earliest step, if every slot takes one step."""
    flow = SlotTimes(stages=stages, duration=lambda slot: 1.0, travel=lambda source, target: 0.0)
    steps = [[int(start) for start in starts] for starts in start_times(orders, flow)]
    length = 1 + max(row[-1] for row in steps)
    slots = [dict(zip(row, order, strict=True)) for row, order in zip(steps, orders, strict=True)]
    return tuple(tuple(by_step.get(step, ()) for step in range(length)) for by_step in slots)


def _stages_per_rank(name: str, family: Family, virtual: int | None) -> int:
    if virtual is None or virtual == family.virtual:
        return family.virtual
    if not family.virtual_free:
        raise Refused(f"{name} got virtual={virtual}, but it always has {family.virtual}; leave it out.")
    return virtual


def refuse(name: str, ranks: int, micro_batches: int) -> str | None:
    """Why a schedule cannot run this number of micro-batches, with the nearest valid ones; None if it can."""
    family = find_family(name)
    _check_ranks(name, ranks)
    if _allowed(family, ranks, micro_batches):
        return None
    fits = " or ".join(str(number) for number in _neighbours(family, ranks, micro_batches))
    found = f"{name} on {ranks} ranks cannot run {micro_batches} micro-batches"
    return f"{found}: it needs {family.demand}; use {fits}."


def least_micro_batches(name: str, ranks: int) -> int:
    """The smallest number of micro-batches that a schedule can run."""
    return micro_batches_near(name, ranks, 1)


def micro_batches_near(name: str, ranks: int, wanted: int) -> int:
    """The valid number of micro-batches nearest to `wanted`; in a tie the larger one, which idles less."""
    family = find_family(name)
    _check_ranks(name, ranks)
    if _allowed(family, ranks, wanted):
        return wanted
    return min(_neighbours(family, ranks, wanted), key=lambda number: (abs(number - wanted), -number))


def _neighbours(family: Family, ranks: int, wanted: int) -> list[int]:
    """The next valid number below, if there is one, and above: large multiples of the ranks are always valid."""
    below = next((number for number in range(wanted - 1, 0, -1) if _allowed(family, ranks, number)), None)
    above = next(number for number in count(max(1, wanted + 1)) if _allowed(family, ranks, number))
    return [above] if below is None else [below, above]


def _allowed(family: Family, ranks: int, micro_batches: int) -> bool:
    return micro_batches >= 1 and family.allows(ranks, micro_batches)


def _check_ranks(name: str, ranks: int) -> None:
    if ranks < 1:
        raise Refused(f"{name} got {ranks} pipeline ranks; it needs at least 1.")
