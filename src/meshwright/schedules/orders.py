"""The order of one rank's actions, for every schedule.

`layers`, `gpipe` and `one_f_one_b` have one stage per rank. `interleaved` and `zero_bubble` assign stages to ranks
round-robin: rank r has stages r, r + ranks, r + 2 ranks ... `zero_bubble_v` and `dual_pipe_v` have two stages per rank
in a V shape, down the ranks and back up, so rank 0 has the first and last stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.schedules.action import Action, Kind, Slot
from meshwright.schedules.schedule import ScheduleShape


class RankOrder:
    """Numbers micro-batches: each stage processes them in order, so an algorithm only names stages and kinds."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._pending: list[Action] = []  # input gradients whose weight gradients are still to be added

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slots)

    def forward(self, stage: int, times: int = 1) -> None:
        self._slots += [(self._next_forward(stage),) for _ in range(times)]

    def backward(self, stage: int, times: int = 1) -> None:
        self._slots += [(self._next_backward(stage, Kind.BACKWARD),) for _ in range(times)]

    def overlap(self, *, forward: int, backward: int) -> None:
        """Add a forward pass of one stage and a backward pass of another that may run at the same time."""
        self._slots.append((self._next_forward(forward), self._next_backward(backward, Kind.BACKWARD)))

    def backward_input(self, stage: int) -> None:
        action = self._next_backward(stage, Kind.BACKWARD_INPUT)
        self._pending.append(action)
        self._slots.append((action,))

    def backward_weight(self, stage: int | None = None, times: int = 1) -> None:
        """Add the oldest pending weight gradients, of one stage or of any; fewer if fewer are pending."""
        pending = [action for action in self._pending if stage in (None, action.stage)]
        for action in pending[:times]:
            self._pending.remove(action)
            self._slots.append((Action(action.stage, Kind.BACKWARD_WEIGHT, action.micro_batch),))

    def _next_forward(self, stage: int) -> Action:
        self._forwards[stage] += 1
        return Action(stage, Kind.FORWARD, self._forwards[stage] - 1)

    def _next_backward(self, stage: int, kind: Kind) -> Action:
        self._backwards[stage] += 1
        return Action(stage, kind, self._backwards[stage] - 1)


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


def round_size(ranks: int, micro_batches: int) -> int | None:
    """Micro-batches that pass one stage before the rank's next stage has its turn; None if rounds would differ.

    There are micro-batches // ranks rounds, at least one, all of the same size.
    """
    rounds = max(1, micro_batches // ranks)
    size, over = divmod(micro_batches, rounds)
    return None if over else size


def interleaved(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """1F1B over several stages on each rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    row = RankOrder()
    # Each rank between this one and the last adds one step forward and one step back.
    for stage in _between_forwards(row, rank, shape, ahead=2 * (shape.ranks - 1 - rank)):
        row.backward(stage)
    return row.slots


def zero_bubble(rank: int, shape: ScheduleShape) -> tuple[Slot, ...]:
    """1F1B with delayed weight gradients, which fill idle time (Qi et al. 2024, arXiv:2401.10241)."""
    row = RankOrder()
    # Half of 1F1B's warm-up: a rank sends its input gradients before it computes its weight gradients.
    for step, stage in enumerate(_between_forwards(row, rank, shape, ahead=shape.ranks - 1 - rank)):
        row.backward_input(stage)
        # Each rank holds one micro-batch less than the previous rank, so it may delay one more weight gradient.
        if step >= rank:
            row.backward_weight()
    row.backward_weight(times=rank)
    return row.slots


def _between_forwards(row: RankOrder, rank: int, shape: ScheduleShape, *, ahead: int) -> Iterator[int]:
    """Add the forward passes, and yield the stage of each backward pass; `ahead` is the lead over the last rank."""
    own = range(rank, shape.stages, shape.ranks)
    forwards = _stage_of_each_pass(own, shape)
    warm_up = min(len(forwards), _last_rank_warm_up(shape) + ahead)
    for stage in forwards[:warm_up]:
        row.forward(stage)
    for step, stage in enumerate(_stage_of_each_pass(own[::-1], shape), start=warm_up):
        if step < len(forwards):
            row.forward(forwards[step])
        yield stage


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
