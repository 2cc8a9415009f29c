"""A ranking by a planner that is kept: what `plan` does for one, and a page that is asked again and again for many."""

from __future__ import annotations

import time

from meshwright.against import weigh
from meshwright.describe.jobfile import load_job
from meshwright.describe.model import describe
from meshwright.facts.cluster import LOCAL, Cluster
from meshwright.facts.plan import Ranking
from meshwright.planner.explain import explain
from meshwright.planner.search import best_of_each_kind, choose
from meshwright.planning import Planner, Wishes
from meshwright.runtime.probe_machine import local_cluster


def open_planner(job: str, wishes: Wishes) -> Planner:
    """A planner for a job as it is written on the command line."""
    loaded = load_job(job)
    return Planner(loaded, describe(loaded), wishes.global_batch or loaded.global_batch, wishes.calibration)


def read_cluster(text: str) -> Cluster:
    """The cluster that a text names, this machine looked at where it says `local`."""
    cluster = Cluster.parse(text)
    return local_cluster() if cluster.device == LOCAL else cluster


def rank(planner: Planner, cluster: Cluster, wishes: Wishes, *, name: str) -> Ranking:
    """All strategies for the planner's job on a cluster, ranked; the finalists traced unless that is not wished."""
    started, known = time.perf_counter(), len(planner.notes)
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
