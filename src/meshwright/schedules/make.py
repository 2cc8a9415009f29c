"""Make a schedule from its name and size: `make("1f1b", 4, 8)`."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import Refused
from meshwright.schedules.action import Slot
from meshwright.schedules.dependencies import SlotTimes, start_times
from meshwright.schedules.families import Family, find_family
from meshwright.schedules.micro_batch_rules import refuse
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
