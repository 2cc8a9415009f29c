"""Orders for stages assigned to ranks round-robin: rank r has stages r, r + ranks, r + 2 ranks ..."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedules.action import Slot
from meshwright.schedules.rank_order import RankOrder
from meshwright.schedules.schedule import ScheduleShape


def round_size(ranks: int, micro_batches: int) -> int | None:
    """Micro-batches that pass one stage before the rank's next stage has its turn; None if rounds would differ.

    There are micro-batches // ranks rounds, at least one, all of the same size.
    """
    rounds = max(1, micro_batches // ranks)
    size, over = divmod(micro_batches, rounds)
    return None if over else size


def interleaved(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """1F1B over several stages on each rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    own = range(rank, shape.stages, shape.ranks)
    forwards, backwards = _stage_of_each_pass(own, shape), _stage_of_each_pass(own[::-1], shape)
    # Each rank between this one and the last adds one step forward and one step back.
    warm_up = min(len(forwards), _last_rank_warm_up(shape) + 2 * (shape.ranks - 1 - rank))
    row = RankOrder()
    for stage in forwards[:warm_up]:
        row.forward(stage)
    for step, stage in enumerate(backwards):
        if warm_up + step < len(forwards):
            row.forward(forwards[warm_up + step])
        row.backward(stage)
    return row.slots


def zero_bubble(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """1F1B with delayed weight gradients, which fill idle time (Qi et al. 2024, arXiv:2401.10241)."""
    own = range(rank, shape.stages, shape.ranks)
    forwards, backwards = _stage_of_each_pass(own, shape), _stage_of_each_pass(own[::-1], shape)
    # Half of 1F1B's warm-up: a rank sends its input gradients before it computes its weight gradients.
    warm_up = min(len(forwards), _last_rank_warm_up(shape) + shape.ranks - 1 - rank)
    row = RankOrder()
    for stage in forwards[:warm_up]:
        row.forward(stage)
    for step, stage in enumerate(backwards):
        if warm_up + step < len(forwards):
            row.forward(forwards[warm_up + step])
        row.backward_input(stage)
        # Each rank holds one micro-batch less than the previous rank, so it may delay one more weight gradient.
        if step >= rank:
            row.backward_weight()
    row.backward_weight(times=rank)
    return row.slots


def _last_rank_warm_up(shape: ScheduleShape) -> int:
    """Forward passes of the last rank before its last stage receives the first micro-batch."""
    return (shape.virtual - 1) * _size(shape)


def _stage_of_each_pass(own: Sequence[int], shape: ScheduleShape) -> list[int]:
    """The stage of each pass: a round passes through all of the rank's `own` stages before the next round starts."""
    size = _size(shape)
    return [stage for _ in range(shape.micro_batches // size) for stage in own for _ in range(size)]


def _size(shape: ScheduleShape) -> int:
    size = round_size(shape.ranks, shape.micro_batches)
    assert size is not None, "make() refuses rounds that differ"
    return size
