"""The messages of a whole step that the planner prices for cp and ep are those that a trace counts, and their bytes."""

from collections import Counter
from functools import cache

import pytest

from meshwright.describe.model import describe
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.jobs.mixture import Experts, mixture_job
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.step_layout import lay_out_step
from meshwright.strategies.model_axis import Sent
from meshwright.tracing import trace_step
from meshwright.tracing.costs import measure_costs

SHAPE = Shape(layers=2, width=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=128, length=32)
JOBS = {
    "cp": decoder_job(SHAPE, global_batch=4),
    "ep": mixture_job(SHAPE, experts=Experts(count=4, chosen=2, width=64), global_batch=8),
}
AXES = {"cp": "context", "ep": "expert"}
Messages = Counter[tuple[str, str, float]]


@cache
def described(word: str) -> ModelFacts:
    return describe(JOBS[word])


def traced(job: Job, facts: ModelFacts, strategy: Strategy, axis: str, ranks: int) -> Messages:
    found: Messages = Counter()
    for m in trace_step(job, facts, strategy, ranks=ranks).messages:
        if m.axis == axis and m.phase in ("forward", "backward"):
            found[m.phase, m.kind, float(m.bytes)] += m.count
    return found


def priced(job: Job, facts: ModelFacts, strategy: Strategy, word: str) -> Messages:
    plain = measure_costs(job, facts, strategy.precision)
    costs = {(strategy.precision, strategy.recompute): plain.recomputed(strategy.recompute)}
    layout = lay_out_step(strategy, facts, job.global_batch)
    (stage,) = StageCosts(facts, costs, hardware_of(Cluster.parse("8xH100-80GB"))).of(layout)
    place = [term.word for term in layout.inner].index(word)
    found: Messages = Counter()
    for unit in stage.units:
        for phase, sent in zip(("forward", "backward"), unit.sent[place], strict=True):
            each: Sent
            for each in sent:
                found[phase, each.kind, each.bytes] += each.times * layout.micro_batches
    return found


@pytest.mark.parametrize(
    ("word", "text", "ranks"),
    [
        ("cp", "fsdp=2,cp=2,bf16,mb=1", 4),
        ("cp", "ddp=2,cp=4,bf16,ac=full,mb=1", 8),
        ("ep", "fsdp=2,ep=2,bf16,mb=1", 4),
        ("ep", "ddp=2,ep=4,bf16,ac=full,mb=1", 8),
    ],
)
def test_a_step_sends_what_was_priced(word: str, text: str, ranks: int) -> None:
    job, facts, strategy = JOBS[word], described(word), Strategy.parse(text).resolve(ranks)
    found = traced(job, facts, strategy, AXES[word], ranks)
    assert found == priced(job, facts, strategy, word) and found.total() >= 8
