"""Plans, layouts and timelines as calls that return values which notebooks show.

They run the job's builder and samples, which draw random numbers, and leave the notebook's generators as they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from meshwright.api.job_planner import Planner, PlanOptions, open_planner, read_allowed, read_cluster
from meshwright.api.plan import rank
from meshwright.api.timeline import forecast_timeline
from meshwright.commands.layout import show_layout
from meshwright.commands.train import load_and_describe
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.layout import Layout
from meshwright.facts.plan import Ranking
from meshwright.facts.strategy import Strategy
from meshwright.facts.timeline import Timeline
from meshwright.recording.blueprint import seeded

SEED = 0
"""Of what is made up while a job is looked at."""


@seeded(SEED)
def plan(
    job: Job | str,
    on: Cluster | str,
    *,
    strategies: Sequence[str] = (),
    precision: str = "bf16",
    batch: int | None = None,
    fast: bool = False,
    top: int = 10,
) -> Ranking:
    """Rank the strategies that fit, as `meshwright plan` does. `job` is a `Job`, or text as on the command line.

    `fast` does not trace the finalists. `ranking.plans[0]` is the recommendation.
    """
    allowed = read_allowed(
        precision=precision,
        recompute="none,selective,full",
        offload="none,optimizer",
        compile=False,
        tensor=True,
        pipeline=True,
    )
    named = tuple(str(Strategy.parse(text)) for text in strategies)
    options = PlanOptions(allowed=allowed, strategies=named, fast=fast, listed=top, global_batch=batch)
    started = time.perf_counter()
    planner = _planner(job, options)
    return rank(planner, _cluster(on), options, name=job if isinstance(job, str) else "job", started=started)


@seeded(SEED)
def layout(job: Job | str, strategy: Strategy | str, *, ranks: int | None = None) -> Layout:
    """How a strategy splits a job, as `meshwright layout` shows it; by default on as few ranks as it needs."""
    parsed = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    known, facts = load_and_describe(job) if isinstance(job, str) else (job, describe(job))
    return Layout(show_layout(known, facts, parsed, ranks or parsed.model_ranks * (parsed.data_size or 1)))


@seeded(SEED)
def timeline(job: Job | str, strategy: Strategy | str, on: Cluster | str) -> Timeline:
    """One step of a pipeline on a cluster, simulated with forecast times."""
    parsed = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    cluster = _cluster(on)
    planner = _planner(job, PlanOptions(fast=True))
    resolved = parsed.resolve(cluster.devices)
    if resolved.stage_axis is None:
        raise Refused(f"A timeline shows a pipeline, but {resolved} has no stages; add a term such as pp=2:1f1b.")
    found = planner.search_named(cluster, [resolved])
    plans = [*found.plans, *found.unfit]
    if not plans:
        raise Refused(found.refused[0].reason)
    return forecast_timeline(planner.context(cluster), plans[0].strategy)


def _planner(job: Job | str, options: PlanOptions) -> Planner:
    if isinstance(job, str):
        return open_planner(job, options)
    return Planner(job, describe(job), options.global_batch or job.global_batch)


def _cluster(on: Cluster | str) -> Cluster:
    return read_cluster(on) if isinstance(on, str) else on
