"""Orders for one stage per rank."""

from __future__ import annotations

from meshwright.schedules.action import Slot
from meshwright.schedules.rank_order import RankOrder
from meshwright.schedules.schedule import ScheduleShape


def layers(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """Layer-wise placement: a micro-batch passes through all stages and back before the next one starts."""
    row = RankOrder()
    for _ in range(shape.micro_batches):
        row.forward(rank)
        row.backward(rank)
    return row.slots


def gpipe(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """All forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)."""
    row = RankOrder()
    row.forward(rank, times=shape.micro_batches)
    row.backward(rank, times=shape.micro_batches)
    return row.slots


def one_f_one_b(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """1F1B: backward passes start as soon as possible (Narayanan et al. 2019, "PipeDream", with a flush per step)."""
    row = RankOrder()
    # The first micro-batch returns to this rank after this many forward passes.
    warm_up = min(shape.micro_batches, shape.ranks - rank)
    row.forward(rank, times=warm_up)
    for _ in range(shape.micro_batches - warm_up):
        row.backward(rank)
        row.forward(rank)
    row.backward(rank, times=warm_up)
    return row.slots
