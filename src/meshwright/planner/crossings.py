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
    """The value of one point of a sweep, and the step of each kind that fits there."""

    value: float
    plans: Mapping[str, Plan]


def lead_changes(stops: Sequence[Stop]) -> list[Crossing]:
    """Where the fastest kind changes. A tie changes nothing: the earlier leader keeps the lead."""
    found: list[Crossing] = []
    leader, before = "", None
    for stop in stops:
        if not stop.plans:
            continue
        fastest = min(stop.plans, key=lambda kind: stop.plans[kind].forecast.step)
        if before is None:
            leader = fastest
        elif crossing := _overtakes(before, stop, leader, fastest):
            found.append(crossing)
            leader = fastest
        before = stop
    return found


def overtakings(stops: Sequence[Stop]) -> list[Crossing]:
    """Where the order of any two kinds changes by more than a tie."""
    kinds = list(dict.fromkeys(kind for stop in stops for kind in stop.plans))
    found: list[Crossing] = []
    for pair in combinations(kinds, 2):
        both = [Stop(stop.value, {kind: stop.plans[kind] for kind in pair if kind in stop.plans}) for stop in stops]
        found += lead_changes(both)
    return sorted(found, key=lambda crossing: crossing.value)


def _overtakes(before: Stop, stop: Stop, leader: str, rival: str) -> Crossing | None:
    if rival == leader:
        return None
    theirs, own = stop.plans.get(leader), stop.plans[rival]
    if theirs is not None and own.forecast.step * (1 + TIE) >= theirs.forecast.step:
        return None
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
