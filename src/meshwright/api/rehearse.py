"""Rehearse a strategy: one rank's real steps in a fake world, compared with its forecast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.api.job_planner import Planner, PlanOptions, open_planner
from meshwright.api.rank_forecast import forecast_rank
from meshwright.api.rehearsal_site import Site
from meshwright.api.roles import distinct_roles
from meshwright.assemble.check import check
from meshwright.commands.preflight import tell_findings
from meshwright.errors import BadInput
from meshwright.facts.rank_forecast import RankForecast
from meshwright.facts.rehearsal import OUT_OF_MEMORY, Rehearsal
from meshwright.facts.strategy import Strategy
from meshwright.rehearse.process import rehearse_apart
from meshwright.rehearse.task import STEPS, RehearsalTask
from meshwright.strategies import Place
from meshwright.units import GIB, show_bytes

Tell = Callable[[str], None]
TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A rehearsal of one rank beside its forecast."""

    strategy: Strategy
    rank: int
    site: Site
    measured: Rehearsal
    forecast: RankForecast

    @property
    def fits(self) -> bool:
        return self.measured.ran and self.measured.held <= self.site.limit

    @property
    def step(self) -> float | None:
        """Seconds of a step: measured compute, and the forecast's communication and idle time."""
        if self.measured.seconds is None or self.forecast.waits is None:
            return self.measured.seconds
        return self.measured.seconds + self.forecast.waits

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": str(self.strategy),
            "world": self.site.world,
            "rank": self.rank,
            "device": self.measured.device,
            "status": self.measured.status,
            "reason": self.measured.reason,
            "measured": _show_measured(self),
            "forecast": _show_forecast(self.forecast),
            "error": _errors(self.measured, self.forecast),
            "fits": self.fits,
            "limit_gib": self.site.limit / GIB,
            "room_gib": (self.site.limit - self.measured.held) / GIB if self.measured.ran else None,
            "seconds": self.measured.took,
            "notes": [*self.measured.notes, *self.forecast.notes],
        }


def _show_measured(compared: Compared) -> dict[str, Any]:
    measured = compared.measured
    at = measured.peak_at
    return {
        "peak_gib": measured.peak / GIB if measured.peak else None,
        "reserved_gib": None if measured.reserved is None else measured.reserved / GIB,
        "memory": {cause: size / GIB for cause, size in measured.memory.items()},
        "peak_at": {"phase": at.phase, "module": at.module} if measured.peak else None,
        "wanted_gib": measured.wanted / GIB if measured.status == OUT_OF_MEMORY else None,
        "compute_ms": None if measured.seconds is None else measured.seconds * 1e3,
        "step_ms": None if compared.step is None else compared.step * 1e3,
        "retries": measured.retries,
    }


def _show_forecast(forecast: RankForecast) -> dict[str, Any]:
    step = None if forecast.compute is None or forecast.waits is None else forecast.compute + forecast.waits
    return {
        "peak_gib": None if forecast.peak is None else forecast.peak / GIB,
        "reserved_gib": None if forecast.reserved is None else forecast.reserved / GIB,
        "memory": {cause: size / GIB for cause, size in forecast.memory.items()},
        "compute_ms": None if forecast.compute is None else forecast.compute * 1e3,
        "waiting_ms": None if forecast.waits is None else forecast.waits * 1e3,
        "step_ms": None if step is None else step * 1e3,
        "time": {cause: seconds * 1e3 for cause, seconds in forecast.time.items()},
        "grade": forecast.grade,
    }


def _errors(measured: Rehearsal, forecast: RankForecast) -> dict[str, float | None]:
    """What was forecast, by what was measured, less one. "time" is that of the computation, which was measured."""
    pairs = {
        "memory": (forecast.peak, measured.peak),
        "reserved": (forecast.reserved, measured.reserved),
        "time": (forecast.compute, measured.seconds),
    }
    return {name: told / seen - 1 if measured.ran and told and seen else None for name, (told, seen) in pairs.items()}


@dataclass
class Rehearser:
    """Rehearses any strategies of one job at one site; a strategy and rank that it has rehearsed is remembered."""

    job: str
    planner: Planner
    site: Site
    timeout: float = TIMEOUT
    steps: int = STEPS
    tell: Tell = lambda words: None
    forecasts: Mapping[str, RankForecast] = field(default_factory=dict)
    """Forecasts made elsewhere, by `forecast_key`; others are made here."""
    traced: bool = True
    """Whether memory is forecast by a trace, which takes seconds, or in closed form."""
    run: Callable[..., Rehearsal] = rehearse_apart
    done: dict[tuple[Strategy, int], Compared] = field(default_factory=dict)

    def check(self, strategy: Strategy) -> Strategy:
        """The resolved strategy; `Refused` if the job cannot run under it."""
        world = self.site.world
        job = replace(self.planner.job, global_batch=self.planner.global_batch)
        place = Place(device=self.site.device, devices=world, ranks=world, local_ranks=1)
        if strategy.traits.many_devices or strategy.engine != "torch":
            word = strategy.data if strategy.traits.many_devices else f"engine={strategy.engine}"
            raise BadInput(f"{word} runs several devices or its own engine, which a fake world cannot stand for.")
        return check(job, self.planner.facts, strategy, place)

    def roles(self, strategy: Strategy) -> list[int]:
        return distinct_roles(strategy, self.planner.facts, self.planner.global_batch)

    def forecast(self, strategy: Strategy, rank: int = 0) -> RankForecast:
        known = self.forecasts.get(forecast_key(strategy, self.site.world, rank, self.planner.global_batch))
        if known is not None:
            return known
        self.tell(f"{strategy} rank {rank}: forecasting")
        return forecast_rank(self.planner, self.site, strategy, rank, traced=self.traced)

    def rehearse(self, strategy: Strategy, rank: int = 0) -> Compared:
        """Rehearse one rank of a resolved strategy."""
        if (strategy, rank) in self.done:
            return self.done[strategy, rank]
        forecast = self.forecast(strategy, rank)
        task = RehearsalTask(
            job=self.job,
            facts=self.planner.facts,
            strategy=strategy,
            world=self.site.world,
            rank=rank,
            device=self.site.device,
            global_batch=self.planner.global_batch,
            limit=self.site.limit,
            steps=self.steps,
        )
        name = f"{strategy} rank {rank} of {self.site.world}"
        self.tell(f"{name}: starting")
        measured = self.run(task, timeout=self.timeout, tell=lambda words: self.tell(f"{name}: {words}"))
        found = Compared(strategy=strategy, rank=rank, site=self.site, measured=measured, forecast=forecast)
        self.tell(f"{name}: {in_words(found)}")
        self.done[strategy, rank] = found
        return found


def forecast_key(strategy: Strategy, world: int, rank: int, global_batch: int) -> str:
    return f"{strategy} {rank}/{world} batch={global_batch}"


def in_words(compared: Compared) -> str:
    """The outcome as part of a line of progress."""
    measured = compared.measured
    if not measured.ran:
        return f"{measured.status}: {measured.reason}"
    verdict = "fits" if compared.fits else "does not fit"
    return f"{show_bytes(measured.held)} of {show_bytes(compared.site.limit)}, {verdict}"


def open_rehearser(
    job: str, site: Site, *, batch: int | None, timeout: float, tell: Tell, steps: int = STEPS
) -> Rehearser:
    """A rehearser of a job as written on the command line."""
    with redirect_stdout(sys.stderr):
        planner = open_planner(job, PlanOptions(global_batch=batch))
    return Rehearser(job=job, planner=planner, site=site, timeout=timeout, tell=tell, steps=steps)


def rehearse_strategy(
    rehearser: Rehearser, text: str, *, rank: int | None = None, all_roles: bool = False
) -> dict[str, Any]:
    """The document of `meshwright rehearse`: the fullest of the rehearsed ranks and, with `all_roles`, each of them.

    If it does not fit, "change" is the smallest change that was rehearsed and does.
    """
    from meshwright.api.smaller import smallest_change

    with redirect_stdout(sys.stderr):
        strategy = rehearser.check(Strategy.parse(text))
        tell_findings(rehearser.planner.job, rehearser.planner.facts, [strategy])
    ranks = rehearser.roles(strategy) if all_roles else [_rank(rank, rehearser.site.world)]
    found = [rehearser.rehearse(strategy, one) for one in ranks]
    fullest = max(found, key=_fullness)
    document = {"job": rehearser.job, "cluster": str(rehearser.site.cluster), **fullest.to_json()}
    document["global_batch"] = rehearser.planner.global_batch
    document["roles"] = [one.to_json() for one in found] if all_roles else []
    document["change"] = None
    if _is_too_large(fullest):
        document["change"] = smallest_change(rehearser, fullest)
    return document


def _rank(rank: int | None, world: int) -> int:
    if rank is not None and rank >= world:
        raise BadInput(f"--rank {rank} is not in a world of {world}: ranks are 0 to {world - 1}.")
    return rank or 0


def _fullness(compared: Compared) -> tuple[bool, bool, int]:
    """Ranks that ran out of memory first, then others that failed, then by what they hold."""
    measured = compared.measured
    return measured.status == OUT_OF_MEMORY, not measured.ran, measured.held


def _is_too_large(compared: Compared) -> bool:
    return compared.measured.status == OUT_OF_MEMORY or (compared.measured.ran and not compared.fits)
