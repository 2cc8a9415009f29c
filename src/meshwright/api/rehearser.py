"""Rehearse strategies of one job: forecast a rank, then take its real steps in a separate process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace

from meshwright.api.compared_rank import Compared
from meshwright.api.job_planner import Planner, PlanOptions, open_planner
from meshwright.api.rank_forecast import forecast_rank
from meshwright.api.rehearsal_site import RehearsalSite
from meshwright.api.roles import distinct_roles
from meshwright.assemble.check import check
from meshwright.errors import BadInput
from meshwright.facts.kernel_table import KernelTable
from meshwright.facts.rank_forecast import RankForecast
from meshwright.facts.rehearsal import Rehearsal
from meshwright.facts.strategy import Strategy
from meshwright.rehearse.process import rehearse_apart
from meshwright.rehearse.task import STEPS, RehearsalTask
from meshwright.strategies import Place
from meshwright.units import show_bytes, show_seconds

Tell = Callable[[str], None]
PATIENCE = 600.0
"""Seconds that one rehearsal may take."""


@dataclass
class Rehearser:
    """Rehearses any strategies of one job at one site; a strategy and rank that it has rehearsed is remembered."""

    job: str
    planner: Planner
    site: RehearsalSite
    timeout: float = PATIENCE
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

    def rehearse(self, strategy: Strategy, rank: int = 0, *, again: bool = False) -> Compared:
        """Rehearse one rank of a resolved strategy; if it has been rehearsed, only if asked to do so `again`."""
        known = self.done.get((strategy, rank))
        if known is not None and not again:
            return known
        forecast = self.forecast(strategy, rank) if known is None else known.forecast
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
    took = "" if compared.step is None else f", {show_seconds(compared.step)} a step"
    return f"{show_bytes(measured.held)} of {show_bytes(compared.site.limit)}, {verdict}{took}"


def open_rehearser(
    job: str,
    site: RehearsalSite,
    *,
    batch: int | None,
    timeout: float,
    tell: Tell,
    steps: int = STEPS,
    kernels: tuple[KernelTable, ...] = (),
) -> Rehearser:
    """A rehearser of a job as written on the command line; forecasts take measured `kernels` where given."""
    with redirect_stdout(sys.stderr):
        planner = open_planner(job, PlanOptions(global_batch=batch, kernels=kernels))
    return Rehearser(job=job, planner=planner, site=site, timeout=timeout, tell=tell, steps=steps)
