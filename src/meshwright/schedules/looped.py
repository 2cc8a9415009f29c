"""Orders for stages that are dealt out to the ranks in rounds: rank r has stages r, r + ranks, r + 2 ranks ..."""

from __future__ import annotations

from meshwright.schedules.action import Slot
from meshwright.schedules.row import Row
from meshwright.schedules.schedule import Shape


def round_size(ranks: int, micro_batches: int) -> int | None:
    """Micro-batches that pass a stage before the next stage of the same rank has its turn; None where rounds differ.

    Rounds are as many as there would be with one micro-batch a rank, and of one size, which is not less than the ranks
    unless there are fewer micro-batches than that.
    """
    rounds = max(1, micro_batches // ranks)
    size, over = divmod(micro_batches, rounds)
    return None if over else size


def interleaved(rank: int, shape: Shape) -> tuple[Slot, ...]:
    """1F1B over several stages on each rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    forwards, backwards = _forward_stages(rank, shape), _backward_stages(rank, shape)
    # One step for the forward pass and one for the backward pass, for each rank between this one and the last.
    warm_up = min(len(forwards), _last_rank_warm_up(shape) + 2 * (shape.ranks - 1 - rank))
    row = Row()
    for stage in forwards[:warm_up]:
        row.forward(stage)
    for step, stage in enumerate(backwards):
        if warm_up + step < len(forwards):
            row.forward(forwards[warm_up + step])
        row.backward(stage)
    return row.slots


def zero_bubble(rank: int, shape: Shape) -> tuple[Slot, ...]:
    """1F1B whose weights' gradients wait, and fill what was idle (Qi et al. 2024, arXiv:2401.10241)."""
    forwards, backwards = _forward_stages(rank, shape), _backward_stages(rank, shape)
    # Half of 1F1B's: a rank passes its input gradients on before it turns to its weights.
    warm_up = min(len(forwards), _last_rank_warm_up(shape) + shape.ranks - 1 - rank)
    row = Row()
    for stage in forwards[:warm_up]:
        row.forward(stage)
    for step, stage in enumerate(backwards):
        if warm_up + step < len(forwards):
            row.forward(forwards[warm_up + step])
        row.backward_input(stage)
        # A rank holds one micro-batch less than the rank before, and may put off the weights of one more.
        if step >= rank:
            row.backward_weight()
    for _ in range(rank):
        row.backward_weight()
    return row.slots


def _last_rank_warm_up(shape: Shape) -> int:
    """Forward passes of the last rank before its last stage gets the first micro-batch."""
    return (shape.virtual - 1) * _size(shape)


def _forward_stages(rank: int, shape: Shape) -> list[int]:
    """The stage of each forward pass: a round goes through one stage after another, then the next round does."""
    rounds = shape.micro_batches // _size(shape)
    own = range(rank, shape.stages, shape.ranks)
    return [stage for _ in range(rounds) for stage in own for _ in range(_size(shape))]


def _backward_stages(rank: int, shape: Shape) -> list[int]:
    rounds = shape.micro_batches // _size(shape)
    own = range(rank, shape.stages, shape.ranks)
    return [stage for _ in range(rounds) for stage in reversed(own) for _ in range(_size(shape))]


def _size(shape: Shape) -> int:
    size = round_size(shape.ranks, shape.micro_batches)
    assert size is not None, "make() refuses rounds that differ"
    return size
