"""Orders for one stage on each rank."""

from __future__ import annotations

from meshwright.schedules.action import Slot
from meshwright.schedules.row import Row
from meshwright.schedules.schedule import Shape


def layers(rank: int, shape: Shape) -> tuple[Slot, ...]:
    """Plain layer-wise placement: a micro-batch goes through all stages and back before the next one starts."""
    row = Row()
    for _ in range(shape.micro_batches):
        row.forward(rank)
        row.backward(rank)
    return row.slots


def gpipe(rank: int, shape: Shape) -> tuple[Slot, ...]:
    """All forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)."""
    row = Row()
    for _ in range(shape.micro_batches):
        row.forward(rank)
    for _ in range(shape.micro_batches):
        row.backward(rank)
    return row.slots


def one_f_one_b(rank: int, shape: Shape) -> tuple[Slot, ...]:
    """Backward passes start as soon as they can (Narayanan et al. 2019, "PipeDream", with a flush after each step)."""
    row = Row()
    # The first micro-batch comes back to this rank when so many have passed it.
    warm_up = min(shape.micro_batches, shape.ranks - rank)
    for _ in range(warm_up):
        row.forward(rank)
    for _ in range(shape.micro_batches - warm_up):
        row.backward(rank)
        row.forward(rank)
    for _ in range(warm_up):
        row.backward(rank)
    return row.slots
