"""Trace the plans that lead a ranking, and rank again until the leader has been traced.

A trace may find that a plan needs more memory than its closed-form forecast says. So the leader is settled by traces
alone, never by a clock: the same request has the same leader on a busy machine. Traces of fewer blocks may leave open
whether a plan fits. The whole model is traced only for an open plan that leads nevertheless: beside a plan that is as
fast and has memory to spare, it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy

TRIES = 16
"""Plans that are traced at most until one that leads fits."""
SURELY = 1.2
"""How far beyond a device's memory a plan must be to leave without a trace of its own."""
OPEN = "may not fit: traces of fewer blocks leave it open"
PATIENCE = 10.0
"""Seconds for tracing the finalists after the leader. They keep their ranks, so load does not change the order."""


@dataclass
class Finals:
    """Plans of a ranking, of which some have been traced."""

    plans: list[Plan]
    """All plans that may fit, in the order of the ranking."""
    unfit: list[Plan] = field(default_factory=list)
    """Plans that a trace found too large, and those that need still more memory."""
    note: str = ""
    """What to know about the leader if it has not been traced."""


def settle(
    plans: list[Plan],
    *,
    rank: Callable[[list[Plan]], list[Plan]],
    trace: Callable[[Plan], Plan],
    decide: Callable[[Plan], Plan] | None = None,
    count: int,
    room: float = inf,
) -> Finals:
    """Trace the leader of `rank(plans)` until a traced one leads, then up to `count` finalists in all.

    `plans` are all that were found; `rank` lists those to show, best first. `decide` traces an open plan as a whole,
    if there can be one. If a plan turns out too large, plans that
    differ from it only by a larger micro-batch leave, too. So do those on other data axes that would need far more than
    `room` bytes if their activations are as much larger than forecast as those of the traced plan.
    """
    started = time.perf_counter()
    found, tried = Finals(list(plans)), set[Strategy]()
    shown = rank(found.plans)
    while shown and _unsettled(shown[0], tried) and len(tried) < TRIES:
        again = decide if shown[0].is_open else None
        tried.add(shown[0].strategy)
        _check(found, shown[0], again or trace, room)
        shown = rank(found.plans)
    if shown and shown[0].strategy not in tried:
        found.note = (
            f"{shown[0].strategy} leads by its closed-form forecast: {TRIES} plans before it turned out too large when "
            "they were traced, and it has not been traced."
        )
    for plan in [plan for plan in shown if plan.strategy not in tried]:
        traced = [one for one in shown if one.strategy in tried and one in found.plans]
        if len(traced) >= count or time.perf_counter() - started > PATIENCE:
            break
        if plan in found.plans:
            tried.add(plan.strategy)
            _check(found, plan, trace, room)
            shown = _still(shown, found.plans)
    left = [plan for plan in shown if plan.is_open and plan.forecast.peak > room]
    found.unfit += [replace(plan, fits=False, why=(OPEN,)) for plan in left]
    return replace(found, plans=[plan for plan in shown if plan not in left])


def _unsettled(leader: Plan, tried: set[Strategy]) -> bool:
    return leader.is_open or leader.strategy not in tried


def _check(found: Finals, plan: Plan, trace: Callable[[Plan], Plan], room: float) -> None:
    """Replace a plan by its traced one, or move it and those that need more to the unfit ones."""
    checked = trace(plan)
    if checked.fits or checked.is_open:
        found.plans = [checked if one is plan else one for one in found.plans]
        return
    found.unfit.append(checked)
    larger = [one for one in found.plans if one is not plan and _needs_more(one.strategy, plan.strategy)]
    why = f"does not fit with mb={plan.strategy.micro_batch} either"
    found.unfit += [replace(one, fits=False, why=(why,)) for one in larger]
    alike = [one for one in found.plans if one is not plan and one not in larger]
    beyond = [one for one in alike if _corrected(one, plan, checked) > SURELY * room]
    why = f"needs far more than forecast, as the trace of {plan.strategy} shows"
    found.unfit += [replace(one, fits=False, why=(why,)) for one in beyond]
    found.plans = [one for one in alike if one not in beyond]


def _corrected(plan: Plan, forecast: Plan, traced: Plan) -> float:
    """A plan's memory if it exceeds its forecast as a traced one does: activations do not depend on the data axis."""
    one, other = plan.strategy, forecast.strategy
    sizes = one.micro_batch, other.micro_batch
    axes: dict[str, Any] = {"data": other.data, "data_size": other.data_size, "variant": other.variant}
    axes |= {"hsdp_replicas": other.hsdp_replicas, "sync": other.sync, "micro_batch": other.micro_batch}
    if sizes[0] is None or sizes[1] is None or replace(one, **axes) != other:
        return 0.0
    return plan.forecast.peak + (traced.forecast.peak - forecast.forecast.peak) * sizes[0] / sizes[1]


def _still(shown: list[Plan], plans: list[Plan]) -> list[Plan]:
    """The shown plans that may still fit, in the same order."""
    by_strategy = {plan.strategy: plan for plan in plans}
    return [by_strategy[plan.strategy] for plan in shown if plan.strategy in by_strategy]


def _needs_more(strategy: Strategy, other: Strategy) -> bool:
    """Whether strategies are alike except that the first has the larger micro-batch."""
    if strategy.micro_batch is None or other.micro_batch is None or strategy.micro_batch < other.micro_batch:
        return False
    return replace(strategy, micro_batch=other.micro_batch) == other
