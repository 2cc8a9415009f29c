"""Find the fastest micro-batch, recompute and strategy that fit by real rehearsals, seeded by the forecast."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from meshwright.api.rehearsal_site import RehearsalSite
from meshwright.api.rehearser import Rehearser
from meshwright.errors import MeshwrightError, Refused
from meshwright.facts.plan import Plan
from meshwright.facts.rehearsal import OUT_OF_MEMORY
from meshwright.facts.strategy import Strategy, divisors
from meshwright.planner.candidates import Allowed, candidates
from meshwright.planner.search import search
from meshwright.planner.tune import Candidate, Trial, Tuner
from meshwright.strategies.pipeline.sizes import is_pipelined
from meshwright.units import GIB, show_bytes, show_seconds


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What may be chosen."""

    allowed: Allowed
    strategy: str | None = None
    """If it is named, only micro-batch, recompute and loss are chosen."""
    trials: int | None = None
    seconds: float = inf
    """No rehearsal begins after this time."""


def tune(rehearser: Rehearser, options: TuneOptions) -> dict[str, Any]:
    """The document of `meshwright rehearse --tune`: the strategy to use, the trials, and why it was chosen."""
    started = time.perf_counter()
    found = tunable(rehearser, options)
    tuner = Tuner(
        candidates=[one.candidate for one in found],
        limit=rehearser.site.limit,
        attempt=Attempts(rehearser, {one.candidate.strategy: one.rank for one in found}),
        most=options.trials,
        is_over=lambda: time.perf_counter() - started >= options.seconds,
    )
    best = tuner.search(lambda low, high: _between(rehearser, low, high))
    return {
        "job": rehearser.job,
        "cluster": str(rehearser.site.cluster),
        "world": rehearser.site.world,
        "global_batch": rehearser.planner.global_batch,
        "limit_gib": rehearser.site.limit / GIB,
        "strategy": None if best is None else str(best.candidate.strategy),
        "step_ms": None if best is None or best.seconds is None else best.seconds * 1e3,
        "peak_gib": None if best is None or best.bytes is None else best.bytes / GIB,
        "candidates": len(found),
        "trials": [_show(trial) for trial in tuner.trials],
        "why": _why(tuner, best),
        "seconds": time.perf_counter() - started,
    }


def tunable(rehearser: Rehearser, options: TuneOptions) -> list[Tunable]:
    """Everything that `tune` chooses from, whether or not it is forecast to fit."""
    found = _forecast(rehearser, _choices(rehearser, options), options.allowed.loss)
    if not found:
        raise Refused("No strategy can run this job on these ranks; see `meshwright plan` for the reasons.")
    return found


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """A strategy that can run."""

    candidate: Candidate
    rank: int
    """A rank of the fullest stage."""


@dataclass
class Attempts:
    """Makes trials."""

    rehearser: Rehearser
    ranks: dict[Strategy, int]
    made: set[Strategy] = field(default_factory=set)

    def __call__(self, candidate: Candidate) -> Trial:
        try:
            self.rehearser.check(candidate.strategy)
        except MeshwrightError as error:
            return Trial(candidate=candidate, fits=False, why=f"refused: {error}")
        again = candidate.strategy in self.made
        self.made.add(candidate.strategy)
        compared = self.rehearser.rehearse(candidate.strategy, self.ranks.get(candidate.strategy, 0), again=again)
        measured = compared.measured
        if measured.status == OUT_OF_MEMORY:
            return Trial(candidate=candidate, fits=False, bytes=float(measured.held + measured.wanted))
        if not measured.ran:
            return Trial(candidate=candidate, fits=False, why=f"{measured.status}: {measured.reason}")
        return Trial(
            candidate=candidate, fits=compared.fits, seconds=compared.quickest_step, bytes=float(measured.held)
        )


def _choices(rehearser: Rehearser, options: TuneOptions) -> Iterator[Strategy]:
    planner, cluster = rehearser.planner, rehearser.site.cluster
    if options.strategy is None:
        yield from candidates(planner.facts, cluster, planner.global_batch, options.allowed)
        return
    named = rehearser.check(Strategy.parse(options.strategy))
    sizes: list[int | None] = [named.micro_batch]
    if named.micro_batch is None and not named.stage_axis:
        sizes = [*divisors(max(1, planner.global_batch // named.data_ranks))]
    for recompute in options.allowed.recompute:
        policies: Any = {"recompute": recompute}
        yield from (replace(named, micro_batch=size, **policies) for size in sizes)


def _forecast(rehearser: Rehearser, strategies: Iterable[Strategy], losses: tuple[str, ...]) -> list[Tunable]:
    """The strategies that can run, with their forecasts, whether or not they are forecast to fit."""
    planner, site = rehearser.planner, rehearser.site
    tried = list(dict.fromkeys(strategies))
    for strategy in tried:
        planner.measure_for(strategy)
    found = search(planner.context(site.cluster), tried, time_all=True, shortcuts=False, losses=losses)
    plans = [*found.plans, *found.unfit]
    return [Tunable(candidate=_candidate(plan, site), rank=_fullest(plan, site.world)) for plan in plans]


def _candidate(plan: Plan, site: RehearsalSite) -> Candidate:
    return Candidate(strategy=plan.strategy, seconds=plan.forecast.step, bytes=float(site.needed(plan.forecast)))


def _fullest(plan: Plan, world: int) -> int:
    """The first rank of the fullest stage."""
    if not plan.stages:
        return 0
    place = max(range(len(plan.stages)), key=lambda index: plan.stages[index].peak)
    return place * world // plan.strategy.stage_ranks


def _between(rehearser: Rehearser, low: Candidate, high: Candidate) -> list[Candidate]:
    """Sizes between two of one family, as they follow from numbers of micro-batches."""
    if is_pipelined(low.strategy):
        return []
    samples = -(-rehearser.planner.global_batch // low.strategy.data_ranks)
    least, most = -(-samples // min(high.size, samples)), -(-samples // low.size)
    sizes = sorted({-(-samples // count) for count in range(least + 1, most)})
    sizes = [size for size in sizes if low.size < size < high.size]
    made = (replace(low.strategy, micro_batch=size) for size in sizes)
    return [one.candidate for one in _forecast(rehearser, made, (low.strategy.loss,))]


def _show(trial: Trial) -> dict[str, Any]:
    return {
        "strategy": str(trial.candidate.strategy),
        "fits": trial.fits,
        "step_ms": None if trial.seconds is None else trial.seconds * 1e3,
        "held_gib": None if trial.bytes is None else trial.bytes / GIB,
        "forecast": {"step_ms": trial.candidate.seconds * 1e3, "reserved_gib": trial.candidate.bytes / GIB},
        "why": trial.why,
    }


def _why(tuner: Tuner, best: Trial | None) -> list[str]:
    tried, known = len({trial.candidate.strategy for trial in tuner.trials}), len(tuner.candidates)
    if best is None or best.seconds is None:
        return [f"None of {tried} strategies that were rehearsed fits; {known} can run here."]
    others = [trial for trial in tuner.trials if trial.fits and trial.candidate != best.candidate and trial.seconds]
    unfit = dict.fromkeys(str(trial.candidate.strategy) for trial in tuner.trials if not trial.fits)
    found = [
        f"It takes {show_seconds(best.seconds)} a step and {show_bytes(best.bytes or 0)} of "
        f"{show_bytes(tuner.limit)} ({(best.bytes or 0) / tuner.limit:.0%})."
    ]
    if others:
        second = min(others, key=lambda trial: trial.seconds or 0.0)
        slower = (second.seconds or 0.0) / best.seconds - 1
        found.append(f"{second.candidate.strategy}, the next, is {slower:.0%} slower.")
    if unfit:
        found.append(f"Did not fit or run: {', '.join(unfit)}.")
    rest = f"the other {known - tried} are not expected to be faster or to fit."
    if tuner.has_more:
        rest = "others might be faster: allow more --trials or --minutes to go on."
    found.append(f"{tried} of {known} strategies were rehearsed; {rest}")
    return found
