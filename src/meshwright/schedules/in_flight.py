"""Count the micro-batches whose activations a rank must keep. The order alone determines it, not the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.schedules.action import Action, Kind
from meshwright.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """The largest number of micro-batches at one time that have started forward and not finished backward."""

    stages: tuple[int, ...]
    """For each stage."""
    ranks: tuple[int, ...]
    """For each rank, over all of its stages: a micro-batch held by two stages counts twice."""


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
