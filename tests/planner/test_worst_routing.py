"""A plan of a mixture says what it costs if all tokens choose experts of one rank; a trace of that rank agrees."""

from functools import cache
from typing import Any

import pytest

from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.plan import rank
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.model import ModelFacts
from meshwright.facts.plan import Plan, show_plan
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.jobs.mixture import Experts, mixture_job
from meshwright.strategies.expert import stacked
from meshwright.strategies.expert.exchange import Route, find_even_route
from meshwright.tracing import trace_step
from meshwright.units import MIB

RANKS = 4
SHAPE = Shape(layers=3, width=256, heads=4, kv_heads=4, feed_forward=512, vocabulary=512, length=512)
JOB = mixture_job(SHAPE, experts=Experts(count=8, chosen=2, width=512), global_batch=64)
CLUSTER = Cluster.parse(f"{RANKS}xH100-80GB")


@cache
def facts() -> ModelFacts:
    return describe(JOB)


def plan_of(text: str) -> Plan:
    options = PlanOptions(strategies=(text,), fast=True)
    (plan,) = rank(Planner(JOB, facts(), JOB.global_batch), CLUSTER, options).plans
    return plan


@pytest.mark.parametrize("policy", ["", ",ac=full"])
def test_memory_of_the_busiest_rank(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"ddp,ep={RANKS},bf16{policy},mb=16"
    plan = plan_of(text)
    assert plan.worst is not None

    def peak() -> int:
        return trace_step(JOB, facts(), Strategy.parse(text), ranks=RANKS, whole=True).peak

    def crowded(rows: int, *given: Any) -> Route:
        even = find_even_route(rows, *given)
        arrived = tuple(tuple(count * RANKS for count in own) for own in even.arrived)
        return Route(sent=even.sent, received=[sum(own) for own in arrived], arrived=arrived, group=even.group)

    even = peak()
    monkeypatch.setattr(stacked, "find_even_route", crowded)
    added, told = peak() - even, plan.worst.peak - plan.forecast.peak
    assert added > 50 * MIB and added / 1.4 < told < 1.6 * added


def test_its_time() -> None:
    plan = plan_of(f"ddp,ep={RANKS},bf16,mb=16")
    assert plan.worst is not None
    assert plan.worst.time["compute"] > 1.2 * plan.forecast.time["compute"]
    assert plan.worst.time["expert"] > plan.forecast.time["expert"]


def test_it_is_told() -> None:
    plan = plan_of(f"ddp,ep={RANKS},bf16,mb=16")
    assert "Routing is taken as balanced: if all tokens chose experts of one rank, a step would take" in plan.why[-1]
    shown = show_plan(plan)["worst_routing"]
    assert shown["reserved_gib"] > show_plan(plan)["reserved_gib"]
    assert Plan.from_json(plan.to_json()) == plan


def test_without_divided_experts_routing_does_not_matter() -> None:
    plan = plan_of("fsdp,bf16,mb=16")
    assert plan.worst is not None and plan.worst.peak == plan.forecast.peak
    assert "do not depend on the routing" in plan.why[-1]


def test_a_model_without_experts_says_nothing_of_it() -> None:
    job = decoder_job(SHAPE, global_batch=8)
    options = PlanOptions(strategies=("ddp,bf16",), fast=True)
    (plan,) = rank(Planner(job, describe(job), 8), CLUSTER, options).plans
    assert plan.worst is None and "worst_routing" not in show_plan(plan)
