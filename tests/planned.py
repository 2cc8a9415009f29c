"""`plan` as the API has it, but each job is described once for all tests, and each of its costs traced once."""

from __future__ import annotations

from functools import cache

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.plan import rank
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import ModelCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Ranking

Costs = dict[tuple[str, str], ModelCosts]
"""By precision and activation checkpointing; planners add to it."""


@cache
def described(job: Job) -> tuple[ModelFacts, Costs]:
    return describe(job), {}


def plan(job: Job, cluster: Cluster, options: PlanOptions | None = None) -> Ranking:
    options, (facts, costs) = options or PlanOptions(), described(job)
    batch = options.global_batch or job.global_batch
    return rank(Planner(job, facts, batch, options.calibration, costs, options.kernels), cluster, options)
