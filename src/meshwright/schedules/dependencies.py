"""Dependencies between actions, and the earliest start of each when every rank keeps its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.schedules.action import Action, Kind, ScheduleError, Slot

Orders = Sequence[Sequence[Slot]]
"""For each rank, its slots in order, without idle ones."""


@dataclass(frozen=True, kw_only=True)
class SlotTimes:
    """How long slots take, and how long a result travels from one stage to another."""

    stages: int
    duration: Callable[[Slot], float]
    travel: Callable[[int, int], float]
    """Seconds from one stage to another; called with the same stage twice if a stage needs its own result."""


def needs(action: Action, stages: int) -> Iterator[Action]:
    """The actions, split into parts, that must finish before an action starts."""
    if action.kind is Kind.FORWARD:
        if action.stage > 0:
            yield Action(action.stage - 1, Kind.FORWARD, action.micro_batch)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        yield Action(action.stage, Kind.BACKWARD_INPUT, action.micro_batch)
    else:
        yield Action(action.stage, Kind.FORWARD, action.micro_batch)
        if action.stage < stages - 1:
            yield Action(action.stage + 1, Kind.BACKWARD_INPUT, action.micro_batch)


def start_times(orders: Orders, flow: SlotTimes) -> list[list[float]]:
    """The earliest start of each slot.

    The order on each rank is fixed, so the times follow from it without an event queue. A slot starts when all of its
    actions can start, and its results leave when all of them are done: PyTorch sends after both actions of a pair.
    """
    ends: dict[Action, float] = {}
    starts: list[list[float]] = [[] for _ in orders]
    free = [0.0] * len(orders)
    while waiting := [rank for rank, order in enumerate(orders) if len(starts[rank]) < len(order)]:
        advanced = False
        for rank in waiting:
            slot = orders[rank][len(starts[rank])]
            arrival = _arrival(slot, ends, flow)
            if arrival is None:
                continue
            advanced = True
            start = max(free[rank], arrival)
            free[rank] = start + flow.duration(slot)
            starts[rank].append(start)
            ends.update({part: free[rank] for action in slot for part in action.parts})
        if not advanced:
            raise ScheduleError(_deadlock(orders, {rank: len(starts[rank]) for rank in waiting}, ends, flow.stages))
    return starts


def _arrival(slot: Slot, ends: Mapping[Action, float], flow: SlotTimes) -> float | None:
    """When the last dependency of a slot arrives; None while one of them has not been scheduled."""
    latest = 0.0
    for action in slot:
        for part in needs(action, flow.stages):
            if part not in ends:
                return None
            latest = max(latest, ends[part] + flow.travel(part.stage, action.stage))
    return latest


def _deadlock(orders: Orders, places: Mapping[int, int], ends: Mapping[Action, float], stages: int) -> str:
    makers = {part: action for order in orders for slot in order for action in slot for part in action.parts}
    stuck = [_stuck(rank, orders[rank][place], makers, ends, stages) for rank, place in places.items()]
    return f"The schedule deadlocks: {'; '.join(stuck)}. Reorder a row so that one of them can run."


def _stuck(rank: int, slot: Slot, makers: Mapping[Action, Action], ends: Mapping[Action, float], stages: int) -> str:
    action, part = next((a, part) for a in slot for part in needs(a, stages) if part not in ends)
    return f"rank {rank} is stuck at {action}, which waits for {makers.get(part, part)}"
