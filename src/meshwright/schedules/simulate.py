"""Simulate a schedule without processes: when each action runs, and how long the ranks idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from meshwright.schedules.action import Action, Kind, ScheduleError, Slot
from meshwright.schedules.dependencies import SlotTimes, start_times
from meshwright.schedules.schedule import Schedule, check_complete

Cost = float | Sequence[float]
"""Seconds: one number for all stages, or one for each stage."""
Travel = Callable[[int, int], float]
"""Seconds from one stage to another."""
_Costs = dict[Kind, tuple[float, ...]]
"""Seconds by kind and stage."""


@dataclass(frozen=True, kw_only=True)
class TimedAction:
    """When an action runs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """The largest number of micro-batches at one time that have started forward and not finished backward."""

    stages: tuple[int, ...]
    """For each stage."""
    ranks: tuple[int, ...]
    """For each rank, over all of its stages: a micro-batch held by two stages counts twice."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The timing of a schedule at given costs."""

    spans: tuple[tuple[TimedAction, ...], ...]
    """For each rank, its actions in order."""
    total: float
    """From the first action's start to the last one's end."""
    busy: tuple[float, ...]
    """For each rank, the time spent computing."""
    until_input: InFlight
    """Micro-batches in flight if the input gradients free the activations."""
    until_weight: InFlight
    """Micro-batches in flight if the weight gradients do; differs only for schedules that split the backward pass."""

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time."""
        return 1 - sum(self.busy) / (len(self.busy) * self.total) if self.total else 0.0


def simulate(
    schedule: Schedule,
    *,
    forward: Cost = 1.0,
    backward_input: Cost = 1.0,
    backward_weight: Cost = 1.0,
    send: float | Travel = 0.0,
) -> Simulation:
    """Simulate a schedule; a whole backward pass costs the sum of its two parts, and a pair the sum of its two actions.

    `send` is the time a result travels between ranks, which compute meanwhile: one number, or a function of the stages
    that send and receive it. Idle steps in the rows are ignored: a
    rank starts each action as soon as it can.
    """
    check_complete(schedule)
    if not callable(send):
        _check_seconds("send", send)
    costs = {
        Kind.FORWARD: _by_stage("forward", forward, schedule.stages),
        Kind.BACKWARD_INPUT: _by_stage("backward_input", backward_input, schedule.stages),
        Kind.BACKWARD_WEIGHT: _by_stage("backward_weight", backward_weight, schedule.stages),
    }
    spans = _play(schedule, costs, send)
    return Simulation(
        spans=spans,
        total=max(row[-1].end for row in spans),
        busy=tuple(sum(_seconds(span.action, costs) for span in row) for row in spans),
        until_input=count_in_flight(schedule, until=Kind.BACKWARD_INPUT),
        until_weight=count_in_flight(schedule, until=Kind.BACKWARD_WEIGHT),
    )


def _seconds(action: Action, costs: _Costs) -> float:
    return sum(costs[part.kind][part.stage] for part in action.parts)


def _play(schedule: Schedule, costs: _Costs, send: float | Travel) -> tuple[tuple[TimedAction, ...], ...]:
    def duration(slot: Slot) -> float:
        return sum(_seconds(action, costs) for action in slot)

    def travel(source: int, target: int) -> float:
        if schedule.rank_of(source) == schedule.rank_of(target):
            return 0.0
        return send(source, target) if callable(send) else send

    orders = [[slot for slot in row if slot] for row in schedule.rows]
    starts = start_times(orders, SlotTimes(stages=schedule.stages, duration=duration, travel=travel))
    return tuple(
        tuple(span for slot, start in zip(order, times, strict=True) for span in _spans(rank, slot, start, costs))
        for rank, (order, times) in enumerate(zip(orders, starts, strict=True))
    )


def _spans(rank: int, slot: Slot, start: float, costs: _Costs) -> Iterator[TimedAction]:
    for action in slot:
        end = start + _seconds(action, costs)
        yield TimedAction(rank=rank, action=action, start=start, end=end)
        start = end


def _by_stage(name: str, cost: Cost, stages: int) -> tuple[float, ...]:
    seconds = tuple(cost) if isinstance(cost, Sequence) else (cost,) * stages
    if len(seconds) != stages:
        raise ScheduleError(f"{name} has {len(seconds)} costs for {stages} stages; give one per stage, or one number.")
    for number in seconds:
        _check_seconds(name, number)
    return seconds


def _check_seconds(name: str, seconds: float) -> None:
    if not (isfinite(seconds) and seconds >= 0):
        raise ScheduleError(f"{name} is {seconds!r}, but must be a time of 0 or more.")


def count_in_flight(schedule: Schedule, *, until: Kind) -> InFlight:
    """Count with activations freed by the input gradients (`until` I) or by the weight gradients (W). A B is both."""
    orders = [schedule.actions_of(rank) for rank in range(schedule.ranks)]
    by_stage = (
        [action for action in orders[schedule.rank_of(stage)] if action.stage == stage]
        for stage in range(schedule.stages)
    )
    return InFlight(
        stages=tuple(_peak(actions, until) for actions in by_stage),
        ranks=tuple(_peak(order, until) for order in orders),
    )


def _peak(actions: Sequence[Action], until: Kind) -> int:
    peak = held = 0
    for action in actions:
        held += action.kind is Kind.FORWARD
        peak = max(peak, held)
        held -= any(part.kind is until for part in action.parts)
    return peak
