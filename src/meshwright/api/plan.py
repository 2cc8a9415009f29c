"""Rank plans: search candidates, trace the finalists, and compare the user's own config."""

from __future__ import annotations

import time

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.rank_foreign import rank_foreign
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.plan import Plan, Ranking, Refusal
from meshwright.planner.explain import explain
from meshwright.planner.search import best_of_each_kind, choose


def plan(job: Job, cluster: Cluster, options: PlanOptions | None = None, *, name: str = "job") -> Ranking:
    """Rank all strategies for a job on a cluster; the finalists are traced unless `options.fast`."""
    options, started = options or PlanOptions(), time.perf_counter()
    planner = Planner(job, describe(job), options.global_batch or job.global_batch, options.calibration)
    return rank(planner, cluster, options, name=name, started=started)


def rank(
    planner: Planner, cluster: Cluster, options: PlanOptions, *, name: str = "job", started: float | None = None
) -> Ranking:
    """Rank with an existing planner, for repeated requests. `started` is when the measured time starts."""
    started, known = started or time.perf_counter(), len(planner.notes)
    found = planner.search(cluster, options)
    # Every strategy that the user named is listed or refused; of a search, only the best of each kind.
    plans = choose(planner.context(cluster), found.plans if options.strategies else best_of_each_kind(found.plans))
    unfit: list[Plan] = []
    if not options.fast:
        plans, unfit = planner.trace_first(cluster, plans, options.finalists)
    advice = () if plans else planner.advise(cluster, options, found)
    return Ranking(
        job=name,
        cluster=str(cluster),
        plans=tuple(explain(plans if options.strategies else plans[: options.listed])),
        refused=(*found.refused, *(Refusal(strategy=str(plan.strategy), reason=plan.why[0]) for plan in unfit)),
        candidates=found.candidates,
        seconds=time.perf_counter() - started,
        advice=(*options.fitted, *planner.notes[known:], *advice),
        against=rank_foreign(planner, cluster, options.against, plans, traced=not options.fast)
        if options.against
        else None,
    )
