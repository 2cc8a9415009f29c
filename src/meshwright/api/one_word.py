"""The one word that would make a run faster, with its forecast gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.neighbours import changes, plain_size
from meshwright.assemble.check import check
from meshwright.errors import MeshwrightError
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed
from meshwright.planner.search import TIE
from meshwright.probe.machine import local_cluster
from meshwright.runtime.place import choose_device, place_for
from meshwright.runtime.waits import DATA
from meshwright.units import show_seconds


def advise_word(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    limit: Mapping[str, Any],
    *,
    step: float,
    ranks: int,
    nodes: int = 1,
    workers: int = 0,
    device: str | None = None,
) -> str:
    """A sentence that names the option or the term to try next. `limit` is the run's, `step` its median seconds.

    Terms are changed one at a time; the precision stays, so the training does.
    """
    if limit["cause"] == DATA:
        return more_workers(step, limit["seconds"], workers)
    kind, per_node = choose_device(device), ranks // nodes
    cluster = replace(local_cluster(kind, devices=per_node), nodes=nodes)
    planner, own = Planner(job, facts, job.global_batch), strategy.resolve(ranks)
    place = place_for(kind, ranks, local_ranks=per_node)
    now = planner.search_named(cluster, [own])
    if not now.plans:
        return "No word is advised: the run's strategy has no forecast."
    for plan in _faster(planner, planner.search(cluster, PlanOptions(allowed=_allowed(own, kind))).plans, now.plans[0]):
        try:
            check(job, facts, plan.strategy, place)
        except MeshwrightError:
            continue
        return _gain(own, plan, now.plans[0])
    return f"By forecast no other word than those of {own} makes a step {TIE:.0%} shorter."


def more_workers(step: float, loading: float, workers: int) -> str:
    """Processes that load in the background: as many as hide the loading behind the rest of the step."""
    rest = max(step - loading, 1e-3)
    wanted = max(workers, 1) * ceil(loading / rest) + (workers == 0)
    after = max(rest, loading * max(workers, 1) / wanted)
    return (
        f"Worth trying: --workers {wanted}, which loads in the background; at best a step takes "
        f"{1 - after / step:.0%} less time ({show_seconds(after)} instead of {show_seconds(step)})."
    )


def _allowed(own: Strategy, device: str) -> Allowed:
    return Allowed(
        precisions=(own.precision,),
        offload=(own.offload,) if device == "cpu" else tuple(dict.fromkeys((own.offload, ""))),
        compile=tuple(dict.fromkeys((own.compile, True))),
        graphs=(own.graphs,),
        loss=(own.loss,),
    )


def _faster(planner: Planner, plans: list[Plan], now: Plan) -> list[Plan]:
    """Plans that differ in one term and are notably faster, the fastest first."""
    kept = [replace(plan, strategy=plain_size(plan.strategy, planner.global_batch)) for plan in plans]
    near = [plan for plan in kept if changes(now.strategy, plan.strategy) == 1]
    return [plan for plan in near if plan.forecast.step < now.forecast.step * (1 - TIE)]


def _gain(own: Strategy, plan: Plan, now: Plan) -> str:
    word = ",".join(term for term in str(plan.strategy).split(",") if term not in str(own).split(","))
    gain = 1 - plan.forecast.step / now.forecast.step
    what = f"{word} ({plan.strategy})" if word else str(plan.strategy)
    return f"Worth trying: {what}; by forecast a step takes {gain:.0%} less time."
