"""What a pieced loss saves, as forecast and as traced, and when the planner tries it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.search import consider
from meshwright.tracing import trace_step

SHAPE = Shape(layers=2, width=256, heads=4, kv_heads=4, feed_forward=512, vocabulary=32000, length=1024)
ONE = Cluster.parse("1xH200")


@pytest.fixture(scope="module")
def planner() -> Planner:
    job = decoder_job(SHAPE, global_batch=64)
    return Planner(job, describe(job), 64)


@pytest.mark.parametrize("policy", ["", pytest.param(",compile", marks=pytest.mark.thorough)])
def test_forecast_and_trace_see_the_same_saving(planner: Planner, policy: str) -> None:
    planner.measure("bf16", "none")
    told, traced = [], []
    for loss in ("whole", "pieced"):
        strategy = Strategy.parse(f"single,bf16,loss={loss}{policy}").resolve(1)
        told.append(consider(planner.context(ONE), strategy).forecast.memory)
        traced.append(trace_step(planner.job, planner.facts, strategy, ranks=1).memory)
    both = [sum(found[0].values()) - sum(found[1].values()) for found in (told, traced)]
    assert both[0] > 2**30 and both[1] > 2**30
    peaks = [sum(found[1].values()) - found[1].get("allocator", 0) for found in (told, traced)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.15)


def test_offered_only_where_logits_are_large(planner: Planner) -> None:
    small = replace(ONE, memory_gib=16)
    tried = {
        cluster: [plan.strategy for plan in planner.search(cluster, PlanOptions(fast=True)).plans]
        for cluster in (small, replace(ONE, memory_gib=10_000))
    }
    pieced = [[s for s in found if s.loss == "pieced"] for found in tried.values()]
    assert pieced[0] and not pieced[1]
