"""Plans ranked: candidates searched, finalists traced, and an imported choice placed among them."""

from __future__ import annotations

import time

from meshwright.against import weigh
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.plan import Ranking
from meshwright.planner.explain import explain
from meshwright.planner.search import best_of_each_kind, choose
from meshwright.planning import Planner, Wishes


def plan(job: Job, cluster: Cluster, wishes: Wishes | None = None, *, name: str = "job") -> Ranking:
    """All strategies for a job on a cluster, ranked; the finalists traced unless that is not wished."""
    wishes, started = wishes or Wishes(), time.perf_counter()
    planner = Planner(job, describe(job), wishes.global_batch or job.global_batch, wishes.calibration)
    return rank(planner, cluster, wishes, name=name, started=started)


def rank(
    planner: Planner, cluster: Cluster, wishes: Wishes, *, name: str = "job", started: float | None = None
) -> Ranking:
    """The same by a planner that is kept, for who asks again and again. Its clock runs from `started`, if told."""
    started, known = started or time.perf_counter(), len(planner.notes)
    found = planner.search(cluster, wishes)
    plans = choose(planner.setting(cluster), best_of_each_kind(found.plans))
    if not wishes.fast:
        plans = planner.trace_first(cluster, plans, wishes.finalists)
    advice = () if plans else planner.advise(cluster, wishes, found)
    return Ranking(
        job=name,
        cluster=str(cluster),
        plans=tuple(explain(plans[: wishes.listed])),
        refused=tuple(found.refused),
        candidates=found.candidates,
        seconds=time.perf_counter() - started,
        advice=(*wishes.fitted, *planner.notes[known:], *advice),
        against=weigh(planner, cluster, wishes.against, plans, traced=not wishes.fast) if wishes.against else None,
    )
