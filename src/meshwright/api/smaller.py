"""If a strategy does not fit, find the smallest change that does, and rehearse it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.api.compared_rank import Compared
from meshwright.api.rehearser import Rehearser
from meshwright.errors import MeshwrightError
from meshwright.facts.data_axis import usual_terms
from meshwright.facts.strategy import Strategy, divisors
from meshwright.planner.search import consider
from meshwright.strategies.pipeline.sizes import is_pipelined

DOUBT = 1.1
"""How far a forecast may be beyond the limit for a change to be rehearsed: it may be wrong by this share."""
TRIES = 5
"""Changes that are rehearsed at most."""


def smallest_change(rehearser: Rehearser, failed: Compared) -> dict[str, Any]:
    """The first change of the ladder that fits when it is rehearsed, and those that were tried before it.

    "strategy" is None if none fits.
    """
    tried: list[Compared] = []
    for strategy in _worth_a_try(rehearser, failed.strategy):
        found = rehearser.rehearse(strategy, failed.rank)
        tried.append(found)
        if found.fits or len(tried) == TRIES:
            break
    fitting = next((one for one in tried if one.fits), None)
    return {
        "strategy": None if fitting is None else str(fitting.strategy),
        "changed": [] if fitting is None else changed_terms(failed.strategy, fitting.strategy),
        "rehearsal": None if fitting is None else fitting.to_json(),
        "tried": [one.to_json() for one in tried if not one.fits],
        "advice": "" if fitting is not None else _advice(bool(tried)),
    }


def changed_terms(before: Strategy, after: Strategy) -> list[str]:
    """The terms that the second strategy has and the first has not."""
    old = str(before).split(",")
    return [term for term in str(after).split(",") if term not in old] or [f"without {','.join(old)}"]


def ladder(strategy: Strategy) -> list[Strategy]:
    """Changes of policies that save memory, smallest first; micro-batches are chosen for each."""
    sharded = _sharded(strategy)
    least = (sharded or [strategy])[-1]
    changes: list[tuple[Strategy, dict[str, Any]]] = [
        (strategy, {}),
        (strategy, {"loss": "pieced"}),
        *((strategy, {"recompute": word}) for word in _more_recompute(strategy)),
        *((other, {}) for other in sharded),
        (least, {"recompute": "full"}),
        (least, {"recompute": "full", "loss": "pieced"}),
        (least, {"recompute": "full", "offload": "optimizer"}),
    ]
    return list(dict.fromkeys(filter(None, (_changed(base, change) for base, change in changes))))


def _changed(strategy: Strategy, change: dict[str, Any]) -> Strategy | None:
    try:
        return replace(strategy, **change)
    except MeshwrightError:  # terms that exclude each other
        return None


def _more_recompute(strategy: Strategy) -> list[Any]:
    order = ["none", "selective", "full"]
    return order[order.index(strategy.recompute) + 1 :]


def _sharded(strategy: Strategy) -> list[Strategy]:
    """The same with a data axis that shards more, least first."""
    if strategy.data_ranks == 1:
        return []
    others = map(Strategy.parse, usual_terms(lambda traits: traits.planned, ()))
    more = sorted((other for other in others if _saving(other) > _saving(strategy)), key=_saving)
    axes = [{"data": other.data, "variant": other.variant, "hsdp_replicas": None} for other in more]
    return [changed for axis in axes if (changed := _changed(strategy, axis)) is not None]


def _saving(strategy: Strategy) -> tuple[int, bool]:
    """How much of the states the data axis shards, and whether it frees gathered parameters early."""
    return len(strategy.traits.shards), strategy.traits.reshards


def _worth_a_try(rehearser: Rehearser, strategy: Strategy) -> Iterator[Strategy]:
    """For each rung of the ladder, the largest micro-batch that is forecast to fit, and half of it."""
    seen = {strategy}
    for rung in ladder(strategy):
        sizes = _sizes(rehearser, rung)
        fitting = next((index for index, size in enumerate(sizes) if _may_fit(rehearser, size)), None)
        for candidate in [] if fitting is None else sizes[fitting : fitting + 2]:
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


def _sizes(rehearser: Rehearser, strategy: Strategy) -> list[Strategy]:
    """The strategy with its micro-batch and with smaller ones, largest first."""
    if is_pipelined(strategy):
        return [strategy]
    samples = max(1, rehearser.planner.global_batch // strategy.data_ranks)
    now = strategy.micro_batch or samples
    smaller = [size for size in reversed(divisors(samples)) if size < now]
    return [strategy, *(replace(strategy, micro_batch=size) for size in smaller)]


def _may_fit(rehearser: Rehearser, strategy: Strategy) -> bool:
    planner, site = rehearser.planner, rehearser.site
    try:
        resolved = rehearser.check(strategy)
        planner.measure_for(resolved)
        forecast = consider(planner.context(site.at_hand), resolved, time_all=False).forecast
    except MeshwrightError:
        return False
    return site.needed(forecast) <= DOUBT * site.limit


def _advice(tried: bool) -> str:
    if tried:
        return "None of the changes that were rehearsed fits; use more ranks, or rehearse with a model axis (tp, pp)."
    return "No change of policies is forecast to fit on these ranks; use more ranks, or divide the model with tp or pp."
