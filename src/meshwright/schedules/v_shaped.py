"""Orders for two stages per rank in a V shape: down the ranks and back up, so rank 0 has the first and last stage."""

from __future__ import annotations

from meshwright.schedules.action import Slot
from meshwright.schedules.rank_order import RankOrder
from meshwright.schedules.schedule import ScheduleShape


def zero_bubble_v(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """ZB-V (Qi et al. 2024, arXiv:2401.10241, section 6).

    If F, I and W take equally long and there are enough micro-batches, a rank never idles between its first and last
    action.
    """
    down, up = rank, shape.stages - 1 - rank
    after = shape.ranks - rank
    # Generate the order of a full pipeline, and drop the surplus micro-batches at the end.
    full = max(shape.micro_batches, 2 * shape.ranks - 1)
    row = RankOrder()
    row.forward(down, times=2 * after - 1)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(after):
        row.forward(up)
        _split_backward(row, up)
    left = full - (2 * shape.ranks - 1 - rank)
    for step in range(full - shape.ranks):
        if step < left:
            row.forward(down)
        _split_backward(row, down)
        row.forward(up)
        _split_backward(row, up)
    for _ in range(rank):
        row.backward_input(down)
        row.backward_input(up)
    for _ in range(after):
        row.backward_input(down)
        row.backward_weight(down)
    row.backward_weight(up, times=rank)
    row.backward_weight(down, times=rank)
    return tuple(slot for slot in row.slots if slot[0].micro_batch < shape.micro_batches)


def dual_pipe_v(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """DualPipeV: DeepSeek's DualPipe (arXiv:2412.19437, section 3.2.1) cut in half into a V.

    The steps follow github.com/deepseek-ai/DualPipe.
    """
    row = RankOrder()
    _fill(row, rank, shape)
    _overlap(row, rank, shape)
    _drain(row, rank, shape)
    return row.slots


def _fill(row: RankOrder, rank: int, shape: ScheduleShape) -> None:
    down, up, after = rank, shape.stages - 1 - rank, shape.ranks - 1 - rank
    row.forward(down, times=2 * after)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(after):
        _split_backward(row, up)
        row.forward(up)


def _overlap(row: RankOrder, rank: int, shape: ScheduleShape) -> None:
    down, up, after = rank, shape.stages - 1 - rank, shape.ranks - 1 - rank
    for step in range(shape.micro_batches - shape.stages + rank + 1):
        if step == 0 and after == 0:
            # On the last rank the first pair runs separately: the backward pass need not wait for the forward pass.
            row.forward(down)
            row.backward(up)
        else:
            row.overlap(forward=down, backward=up)
        row.overlap(forward=up, backward=down)
    for _ in range(after):
        row.backward(up)
        row.overlap(forward=up, backward=down)


def _drain(row: RankOrder, rank: int, shape: ScheduleShape) -> None:
    down, up, after = rank, shape.stages - 1 - rank, shape.ranks - 1 - rank
    # The second half of the last backward passes is split, so that weight gradients fill the idle slots.
    for place in range(2 * (rank + 1)):
        stage = down if place % 2 else up
        if place <= rank:
            row.backward(stage)
        else:
            row.backward_input(stage)
    for _ in range(after):
        row.backward_weight()
        row.backward_input(down)
    row.backward_weight(times=rank + 1)


def _split_backward(row: RankOrder, stage: int) -> None:
    row.backward_input(stage)
    row.backward_weight(stage)
