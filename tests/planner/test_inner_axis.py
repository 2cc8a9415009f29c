"""An inner axis that the planner has never heard of is priced by what its Division says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import UnitCosts
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.candidates import Allowed, candidates
from meshwright.planner.collectives import group_on
from meshwright.planner.explain import explain
from meshwright.planner.search import consider
from meshwright.planner.site import Site
from meshwright.planner.step_layout import lay_out_step
from meshwright.strategies import InnerAxis, register, unregister
from meshwright.strategies.cuts import Cuts
from meshwright.strategies.model_axis import Division, Sent, UnitShare

SHAPE = Shape(layers=2, width=256, heads=4, kv_heads=4, feed_forward=1024, vocabulary=1024, length=128)
CLUSTER = Cluster.parse("2x4xA100-40GB")


class SampleDivision(Division):
    """Samples over ranks, parameters whole; each block's output is exchanged."""

    def __init__(self, ranks: int) -> None:
        self.boundary_parts = ranks

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        sent = (Sent(kind="all_to_all", bytes=stream),) if unit.is_block else ()
        return UnitShare(parts=self.boundary_parts, forward=sent)


class Samples(InnerAxis):
    summary = "samples of a micro-batch over ranks"
    traits = AxisTraits(word="sp", mesh_name="samples", place=10, complexity=5)

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        return f"sp={term.size} has fewer samples than ranks." if term.size > global_batch else None

    def sizes(self, facts: ModelFacts, cluster: Cluster) -> Collection[int]:
        return (2,)

    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        return {}

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        return SampleDivision(ranks)


@pytest.fixture(scope="module")
def planner() -> Iterator[Planner]:
    register(Samples())
    job = decoder_job(SHAPE, global_batch=16)
    made = Planner(job, describe(job), job.global_batch)
    made.measure("bf16", "none")
    yield made
    unregister("sp")


def plan(planner: Planner, text: str) -> Plan:
    return consider(planner.context(CLUSTER), Strategy.parse(text))


def test_memory_and_time_are_those_of_its_division(planner: Planner) -> None:
    alone, divided = plan(planner, "ddp=8,bf16,mb=2"), plan(planner, "ddp=4,sp=2,bf16,mb=2")
    assert divided.forecast.memory["parameters"] == alone.forecast.memory["parameters"]
    assert divided.forecast.memory["activations"] == pytest.approx(alone.forecast.memory["activations"] / 2, rel=0.01)
    assert divided.forecast.time["samples"] > 0 and divided.forecast.time["tensor"] == 0
    assert alone.forecast.time["samples"] == 0


def test_it_is_combined_with_tensor_parallelism(planner: Planner) -> None:
    divided, both = plan(planner, "ddp=4,tp=2,bf16,mb=4"), plan(planner, "ddp=2,sp=2,tp=2,bf16,mb=4")
    assert both.forecast.memory["parameters"] == divided.forecast.memory["parameters"]
    assert both.forecast.memory["activations"] == pytest.approx(divided.forecast.memory["activations"] / 2, rel=0.02)
    assert both.forecast.time["tensor"] < 2 * divided.forecast.time["tensor"]  # over half of the samples each
    assert both.forecast.time["samples"] > 0


def test_its_group_is_where_the_mesh_puts_it(planner: Planner) -> None:
    strategy = Strategy.parse("ddp=2,sp=2,tp=2,bf16,mb=4").resolve(8)
    context = planner.context(CLUSTER)
    step_layout = lay_out_step(strategy, context.facts, context.global_batch)
    site = Site(
        hardware=context.hardware, per_node=4, step_layout=step_layout, collective=context.stage_costs.collective
    )
    groups = [(term.word, group) for term, group in site.inner]
    assert groups == [("sp", group_on(2, 2, 4, job_nodes=2)), ("tp", group_on(2, 1, 4, job_nodes=2))]
    assert (site.data, step_layout.inner_ranks) == (group_on(2, 4, 4, job_nodes=2), 4)


def test_it_is_searched_refused_and_explained(planner: Planner) -> None:
    found = list(candidates(planner.facts, CLUSTER, planner.global_batch, Allowed()))
    assert any(term.word == "sp" for strategy in found for term in strategy.axes)
    assert not any(strategy.inner_axes for strategy in candidates(planner.facts, CLUSTER, 16, Allowed(tensor=False)))
    refused = planner.search_named(Cluster.parse("8x4xA100-40GB"), [Strategy.parse("sp=32,bf16")]).refused
    assert "fewer samples than ranks" in refused[0].reason
    slow, fast = plan(planner, "ddp=4,sp=2,bf16,mb=2"), plan(planner, "ddp=8,bf16,mb=2")
    assert "samples" in slow.forecast.time and explain([fast, slow])[1].why
