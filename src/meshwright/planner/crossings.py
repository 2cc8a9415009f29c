"""Where one kind of strategy overtakes another along a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.facts.sweep import Crossing
from meshwright.planner.search import TIE


def kind_of(strategy: Strategy) -> str:
    """The axes of a strategy without their sizes, such as `fsdp+tp`: what stays comparable along a sweep."""
    data = ":".join(filter(None, [strategy.data, strategy.variant]))
    return "+".join([*([data] if data else []), *(term.word for term in strategy.axes)])


@dataclass(frozen=True)
class Stop:
    """One point of a sweep."""

    value: float
    plans: Mapping[str, Plan]
    """The best plan of each kind that fits there."""
    best: str | None
    """The kind that leads; None if nothing fits."""


def lead_changes(stops: Sequence[Stop]) -> list[Crossing]:
    """Where the leading kind changes. A kind that ties with the fastest keeps its lead."""
    found: list[Crossing] = []
    leader: str | None = None
    before: Stop | None = None
    for stop in stops:
        if stop.best is None:
            continue
        if leader is None or before is None:
            leader = stop.best
        elif not _keeps_lead(stop, leader):
            found.append(_overtakes(before, stop, leader, stop.best))
            leader = stop.best
        before = stop
    return found


def overtakings(stops: Sequence[Stop]) -> list[Crossing]:
    """Where the order of any two kinds changes by more than a tie."""
    kinds = list(dict.fromkeys(kind for stop in stops for kind in stop.plans))
    found = [one for pair in combinations(kinds, 2) for one in lead_changes([_only(stop, pair) for stop in stops])]
    return sorted(found, key=lambda crossing: crossing.value)


def _only(stop: Stop, kinds: tuple[str, ...]) -> Stop:
    plans = {kind: stop.plans[kind] for kind in kinds if kind in stop.plans}
    return Stop(stop.value, plans, min(plans, key=lambda kind: plans[kind].forecast.step, default=None))


def _keeps_lead(stop: Stop, leader: str) -> bool:
    fastest = min(plan.forecast.step for plan in stop.plans.values())
    return leader in stop.plans and stop.plans[leader].forecast.step <= fastest * (1 + TIE)


def _overtakes(before: Stop, stop: Stop, leader: str, rival: str) -> Crossing:
    theirs, own = stop.plans.get(leader), stop.plans[rival]
    last = theirs or before.plans.get(leader)
    return Crossing(
        value=stop.value,
        kind=rival,
        strategy=str(own.strategy),
        over=leader,
        over_strategy=str(last.strategy) if last else leader,
        gain=None if theirs is None else 1 - own.forecast.step / theirs.forecast.step,
        why="fits" if theirs is None else "faster",
    )
