"""What recomputing saves and costs when blocks are compiled."""

from __future__ import annotations

import pytest

from meshwright.api.job_planner import Planner, PlanOptions, open_planner, read_cluster
from meshwright.describe.model import describe
from meshwright.facts.forecast import Forecast
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.search import consider
from meshwright.tracing import trace_step

SHAPE = Shape(layers=6, width=1024, heads=8, kv_heads=8, feed_forward=4096, vocabulary=1024, length=1024)
POLICIES = ("none", "selective", "full")


def forecast(planner: Planner, text: str) -> Forecast:
    return consider(planner.context(read_cluster("8xH200")), Strategy.parse(text).resolve(8)).forecast


def test_compiling_saves_nothing_more_of_what_recomputing_blocks_keep() -> None:
    job = decoder_job(SHAPE, global_batch=64)
    planner = Planner(job, describe(job), 64)
    planner.measure("bf16", "selective")
    texts = ["fsdp,bf16,ac=selective", "fsdp,bf16,compile,ac=selective"]
    told = [forecast(planner, text).memory["activations"] for text in texts]
    traced = [trace_step(job, planner.facts, Strategy.parse(text), ranks=8).memory["activations"] for text in texts]
    assert told[1] == pytest.approx(told[0], rel=0.06)
    assert traced[1] == pytest.approx(traced[0], rel=0.06)


def test_compiled_recomputation_costs_what_was_measured() -> None:
    # Kernels of forward and backward on an H200: 101.7, 103.7 and 118.6 ms (docs/data/recompute_cost.json).
    planner = open_planner("preset:gpt2-xl", PlanOptions(global_batch=32))
    for policy in POLICIES:
        planner.measure("bf16", policy)
    none, selective, full = (forecast(planner, f"ddp,bf16,compile,ac={policy}").time["compute"] for policy in POLICIES)
    assert selective / none == pytest.approx(1.020, abs=0.01)
    assert full / none == pytest.approx(1.166, abs=0.02)
