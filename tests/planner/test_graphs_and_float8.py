"""Forecasts of `graphs` and `fp8`."""

from __future__ import annotations

import pytest

import tiny_jobs
from meshwright.api.job_planner import PlanOptions
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.candidates import Allowed
from meshwright.tracing.record_step import record_step
from planned import plan

H200 = Cluster.parse("1xH200")
WIDE = decoder_job(
    Shape(layers=2, width=4096, heads=32, kv_heads=8, feed_forward=14336, vocabulary=1024, length=2048), global_batch=4
)


def named(job: object, cluster: str, *strategies: str) -> dict[str, Plan]:
    found = plan(job, Cluster.parse(cluster), PlanOptions(fast=True, strategies=strategies))  # type: ignore[arg-type]
    return {str(one.strategy): one for one in found.plans}


def test_graphs_close_the_gaps_of_the_host() -> None:
    found = named(tiny_jobs.transformer, "1xH200", "single,bf16", "single,bf16,graphs")
    eager, replayed = (found[text].forecast for text in ("single,bf16", "single,bf16,graphs"))
    assert replayed.time["host"] < eager.time["host"] / 2
    assert replayed.time["compute"] == eager.time["compute"]
    assert replayed.step < eager.step / 2


def test_graphs_gain_nothing_where_kernels_are_long() -> None:
    found = named(WIDE, "1xH200", "single,bf16", "single,bf16,graphs")
    eager, replayed = (found[text].forecast for text in ("single,bf16", "single,bf16,graphs"))
    assert replayed.step > 0.9 * eager.step
    assert replayed.memory["gradients"] >= eager.memory["gradients"]


def test_ddp_reduces_after_a_graph() -> None:
    found = named(WIDE, "4xH200", "ddp=4,bf16", "ddp=4,bf16,graphs")
    assert found["ddp=4,bf16,graphs"].forecast.time["data"] > found["ddp=4,bf16"].forecast.time["data"]


def test_the_planner_offers_graphs_and_ranks_them_if_asked() -> None:
    usual = plan(tiny_jobs.transformer, H200, PlanOptions(fast=True))
    assert not any(one.strategy.graphs for one in usual.plans)
    assert "Use --graphs to rank such plans." in " ".join(usual.advice)
    asked = plan(tiny_jobs.transformer, H200, PlanOptions(fast=True, allowed=Allowed(graphs=(False, True))))
    assert asked.plans[0].strategy.graphs
    assert not any("--graphs" in sentence for sentence in asked.advice)


def test_what_graphs_cannot_replay_is_refused_by_name() -> None:
    found = plan(WIDE, Cluster.parse("4xH200"), PlanOptions(fast=True, strategies=("fsdp,bf16,graphs", "tp=4,graphs")))
    assert not found.plans
    assert "which fsdp needs" in found.refused[0].reason
    assert "not built for tp" in found.refused[1].reason


def test_fp8_is_faster_where_products_are_large() -> None:
    found = named(WIDE, "1xH200", "single,bf16,compile", "single,fp8,compile")
    low, small = (found[text].forecast for text in ("single,bf16,compile", "single,fp8,compile"))
    assert small.time["compute"] < 0.9 * low.time["compute"]
    assert small.memory["activations"] < 1.05 * low.memory["activations"]


def test_fp8_of_small_layers_is_bf16() -> None:
    found = named(tiny_jobs.transformer, "1xH200", "single,bf16", "single,fp8")
    assert found["single,fp8"].forecast.step == pytest.approx(found["single,bf16"].forecast.step)


@pytest.mark.parametrize(
    ("cluster", "text", "reason"),
    [
        ("2xA100-80GB", "ddp,fp8", "A100-80GB has no units for fp8; use fp32 or bf16 or fp16."),
        ("2xH200", "op=2,fp8", "fp8 is not built for layers that op divides"),
    ],
)
def test_fp8_is_refused_by_name(cluster: str, text: str, reason: str) -> None:
    found = plan(tiny_jobs.transformer, Cluster.parse(cluster), PlanOptions(fast=True, strategies=(text,)))
    assert reason in found.refused[0].reason


def test_a_traced_step_runs_through_float8() -> None:
    recorded = record_step(WIDE, describe(WIDE), Strategy.parse("single,fp8").resolve(1), 1, 0)
    products = [one for one in recorded.operations if one.kind == "matmul" and one.dtype == "fp8"]
    # Of seven layers per block, each multiplies three times: all but their shapes are alike.
    assert sum(recorded.operations[one] for one in products) == 2 * 7 * 3
    assert all(one.flops and one.shape for one in products)
