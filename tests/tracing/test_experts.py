"""What a rank of divided experts sends in a trace is what the planner prices, for balanced routing."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.describe.model import describe
from meshwright.facts.costs import UnitCosts
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.jobs.decoder import Shape
from meshwright.jobs.mixture import Experts, mixture_job
from meshwright.strategies.expert.division import ExpertDivision
from meshwright.strategies.model_axis import Sent
from meshwright.tracing import step, trace_step
from meshwright.tracing.block_stack import BlockStack, find_repeated_blocks
from meshwright.tracing.costs import measure_costs

BATCH, EXPERTS, RANKS = 8, 4, 2
SHAPE = Shape(layers=2, width=32, heads=2, kv_heads=2, feed_forward=64, vocabulary=64, length=16)
JOB = mixture_job(SHAPE, experts=Experts(count=EXPERTS, chosen=2, width=64), global_batch=BATCH)


@cache
def facts() -> ModelFacts:
    return describe(JOB)


@cache
def trace(policy: str) -> Trace:
    strategy = Strategy.parse(f"ep={RANKS},fsdp=2{policy}")
    return trace_step(JOB, facts(), strategy, ranks=2 * RANKS, rank=0, whole=True)


def sent(found: Trace, phase: str) -> Counter[float]:
    messages = [m for m in found.messages if (m.kind, m.axis, m.phase) == ("all_to_all", "expert", phase)]
    return sum((Counter({m.bytes: m.count}) for m in messages), Counter())


def priced(units: tuple[UnitCosts, ...], phase: str) -> Counter[float]:
    division, samples = ExpertDivision(facts(), RANKS), BATCH // (2 * RANKS)
    shares = [division.share(unit, samples, 0.0) for unit in units]
    found: list[Sent] = [one for share in shares for one in getattr(share, phase)]
    return sum((Counter({one.bytes: one.times}) for one in found), Counter())


@pytest.mark.parametrize(("policy", "recompute"), [("", "none"), (",ac=full", "full")])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_messages_and_their_bytes_are_those_that_are_priced(policy: str, recompute: str, phase: str) -> None:
    units = measure_costs(JOB, facts(), "fp32").recomputed(recompute).units
    found = sent(trace(policy), phase)
    assert found == priced(units, phase) and found.total() >= 3 * SHAPE.layers


def test_experts_are_gathered_and_reduced_by_fewer_ranks() -> None:
    elements = 3 * EXPERTS * SHAPE.width * 64 // RANKS
    for kind in ("all_gather", "reduce_scatter"):
        own = [m for m in trace("").messages if (m.kind, m.axis) == (kind, "shard")]
        assert own and {(m.bytes, m.ranks) for m in own} == {(4 * elements, 2)}


@pytest.mark.thorough
def test_dense_layers_before_the_mixtures_do_not_need_a_trace_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in DeepSeek-V3: the first layers differ from all others."""
    job = mixture_job(
        replace(SHAPE, layers=15), experts=Experts(count=4, chosen=2, width=64, dense_layers=1), global_batch=4
    )
    found = describe(job)
    assert find_repeated_blocks(found) == BlockStack("blocks", 14, 1)
    recorded: list[int] = []
    run = step.record_step

    def record(job: Job, facts: ModelFacts, *given: Any, **rest: Any) -> Any:
        recorded.append(len(facts.blocks))
        return run(job, facts, *given, **rest)

    monkeypatch.setattr(step, "record_step", record)
    strategy = Strategy.parse("ddp=1,ep=2,bf16,ac=full")
    short, whole = (trace_step(job, found, strategy, ranks=2, whole=whole) for whole in (False, True))
    assert recorded == [5, 9, 15]
    assert short.peak == pytest.approx(whole.peak, rel=0.01)
    sent = [sum(m.bytes * m.count for m in one.messages) for one in (short, whole)]
    assert sent[0] == pytest.approx(sent[1], rel=0.001)
