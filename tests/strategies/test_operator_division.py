"""What the planner counts for `op=N` from facts alone, against what the engine divides and sends."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import tiny_jobs
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.recording.blueprint import record
from meshwright.strategies.operator.axis import OperatorDivision
from meshwright.strategies.operator.rules import recognise
from meshwright.strategies.operator.split import plan_operators
from meshwright.tracing import trace_step
from meshwright.tracing.costs import measure_costs

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def described(name: str) -> tuple[Job, ModelFacts]:
    job = tiny_jobs.transformer if name == "transformer" else load_job(str(EXAMPLES / f"{name}.py"))
    return job, describe(job)


def cut_parameters(job: Job, facts: ModelFacts, ranks: int) -> set[str]:
    """Names of the parameters that the engine divides."""
    model = record(job.model, seed=0, values=False).model
    found = set()
    for row in plan_operators(model, ranks, frozenset(facts.read_elsewhere)).divided:
        kind = recognise(module := model.get_submodule(row.name))
        assert kind is not None
        way = next(way for way in kind.ways(module) if way.along == row.along)
        found |= {f"{row.name}.{path}" for path in way.cuts}
    return found


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("gpt", 2), ("gpt", 4), ("cnn", 2), ("cnn", 3), ("resnet", 2), ("resnet", 4), ("transformer", 2)],
)
def test_it_divides_what_the_engine_divides(name: str, ranks: int) -> None:
    job, facts = described(name)
    division = OperatorDivision(facts, ranks)
    found = {alias for p in facts.parameters if division.parts_of(p.names) > 1 for alias in p.names}
    assert found == cut_parameters(job, facts, ranks)


@pytest.mark.parametrize("name", ["gpt", "cnn", "resnet"])
def test_it_sends_what_a_traced_step_sends(name: str) -> None:
    job, facts = described(name)
    traced: Counter[tuple[str, str]] = Counter()
    trace = trace_step(job, facts, Strategy.parse("op=2"), ranks=2)
    for message in trace.messages:
        if message.bytes > 64:  # the loss and its weight are not the axis's
            traced[message.phase, message.kind] += round(message.bytes * message.count)
    division, counted = OperatorDivision(facts, 2), Counter[tuple[str, str]]()
    for unit in measure_costs(job, facts, "fp32").units:
        share = division.share(unit, job.global_batch, 0.0)
        assert share.parts == 1  # activations are whole
        for phase, sent in (("forward", share.forward), ("backward", share.backward)):
            for each in sent:
                counted[phase, each.kind] += round(each.bytes * each.times)
    # The first convolution's input needs no gradient, which facts do not tell.
    assert dict(counted) == {key: pytest.approx(size, rel=0.03) for key, size in traced.items()}
    held = sum(p.count // division.parts_of(p.names) * p.itemsize for p in facts.parameters)
    # Buffers are counted there too, and each tensor is rounded up to what the allocator hands out.
    assert held <= trace.memory["parameters"] <= 1.12 * held
