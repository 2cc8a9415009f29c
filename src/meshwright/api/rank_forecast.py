"""Forecast one rank of a strategy, for comparison with its rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.api.job_planner import Planner
from meshwright.api.rehearsal_site import RehearsalSite, without_links
from meshwright.errors import MeshwrightError
from meshwright.facts.cluster import Cluster
from meshwright.facts.forecast import Forecast
from meshwright.facts.plan import Plan
from meshwright.facts.rank_forecast import RankForecast
from meshwright.facts.strategy import Strategy
from meshwright.planner.search import consider


def forecast_rank(
    planner: Planner, site: RehearsalSite, strategy: Strategy, rank: int, *, traced: bool = True
) -> RankForecast:
    """Memory of a traced step of the whole model, or in closed form, and the planner's time."""
    planner.measure_for(strategy)
    notes: list[str] = []
    timed = _time(planner, site, strategy, rank, notes)
    peak, reserved, memory, grade = _memory(planner, site, strategy, rank, notes, traced=traced)
    return RankForecast(
        peak=peak,
        reserved=reserved,
        memory=memory,
        grade=grade,
        compute=timed.compute if timed else None,
        waits=timed.waits if timed else None,
        time=timed.time if timed else {},
        notes=tuple(notes),
    )


def _memory(
    planner: Planner, site: RehearsalSite, strategy: Strategy, rank: int, notes: list[str], *, traced: bool
) -> tuple[int | None, int | None, Mapping[str, int], str]:
    if traced:
        from meshwright.tracing import trace_step  # slow import

        try:
            # A pipeline keeps something of every micro-batch until the end of its step.
            whole = replace(planner.job, global_batch=planner.global_batch)
            job, on_gpu = whole if strategy.stage_axis else planner.short_job(strategy), site.device == "cuda"
            trace = trace_step(job, planner.facts, strategy, ranks=site.world, rank=rank, whole=True, workspaces=on_gpu)
        except MeshwrightError as error:
            notes.append(f"The step could not be traced; its closed-form forecast is used: {error}")
        else:
            notes += [trace.unseen] if trace.unseen else []
            return trace.peak, trace.reserved if on_gpu else None, dict(trace.memory), "trace"
    try:
        own = _own(consider(planner.context(site.at_hand), strategy), strategy, rank, site.world)
    except MeshwrightError as error:
        notes.append(f"There is no forecast of its memory: {error}")
        return None, None, {}, "account"
    memory, needed = site.causes(own), site.needed(own)
    return sum(memory.values()), needed if site.device == "cuda" else None, memory, "account"


def _time(
    planner: Planner, site: RehearsalSite, strategy: Strategy, rank: int, notes: list[str]
) -> RankForecast | None:
    """Compute on the device at hand, and what the cluster adds to it."""
    try:
        compute = _compute(planner, site.at_hand, strategy, rank)
        whole = consider(planner.context(site.cluster), strategy).forecast
        alone = compute if not site.is_named else _compute(planner, site.cluster, strategy, rank)
    except MeshwrightError as error:
        notes.append(f"There is no forecast of its time: {error}")
        return None
    if compute is None or alone is None:
        notes.append("There is no forecast of this stage's time: only the fullest stages of a long pipeline have one.")
        return None
    return RankForecast(compute=compute, waits=max(0.0, whole.step - alone), time=dict(whole.time))


def _compute(planner: Planner, cluster: Cluster, strategy: Strategy, rank: int) -> float | None:
    """Seconds that the rank is busy if messages take no time."""
    plan = consider(planner.context(without_links(cluster)), strategy)
    return _own(plan, strategy, rank, cluster.devices).step or None


def _own(plan: Plan, strategy: Strategy, rank: int, world: int) -> Forecast:
    """The forecast of the rank's stage."""
    if not plan.stages:
        return plan.forecast
    place = rank * strategy.stage_ranks // world
    return plan.stages[place] if place < len(plan.stages) else Forecast()
