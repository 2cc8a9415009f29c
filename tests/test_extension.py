"""A data strategy is one file and one line: a made-up one goes everywhere, with no other file touched."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import made_up_strategy
import tiny_jobs
from made_up_strategy import Summed, registered
from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.plan import rank
from meshwright.assemble.check import check
from meshwright.commands.layout import show_layout
from meshwright.describe.model import describe
from meshwright.errors import ExchangeError, Refused, UnknownTerm
from meshwright.exchange import export
from meshwright.exchange.export_request import ExportRequest
from meshwright.facts.cluster import Cluster
from meshwright.facts.data_axis import DATA_AXES
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed, candidates
from meshwright.runtime.place import place_for
from meshwright.strategies import DATA_STRATEGIES, data_strategy
from meshwright.strategies.deepspeed import package
from meshwright.verify.strategy_choice import plain_strategies
from rank_pool import RankPool

JOB = tiny_jobs.transformer
CLUSTER = Cluster.parse("2xA100-40GB")


@cache
def facts() -> ModelFacts:
    return describe(JOB)


@pytest.fixture
def summed() -> Iterator[Strategy]:
    with registered(Summed()):
        yield Strategy.parse("summed").resolve(2)


def subject(strategy: Strategy) -> ExportRequest:
    return ExportRequest(strategy=strategy, ranks=2, job="job.py", global_batch=8)


def test_nothing_is_left_of_it() -> None:
    before = dict(DATA_STRATEGIES), dict(DATA_AXES)
    with registered(Summed()):
        assert "summed" in DATA_AXES
    assert before == (DATA_STRATEGIES, DATA_AXES)
    with pytest.raises(UnknownTerm, match="'summed'"):
        Strategy.parse("summed")


@pytest.mark.parametrize("text", ["summed", "summed=2", "summed=2,tp=2,bf16,ac=full", "summed,pp=2:1f1b,mb=1"])
def test_its_text(summed: Strategy, text: str) -> None:
    assert str(Strategy.parse(text)) == text
    assert (summed.data_ranks, summed.shards, summed.replicas) == (2, 1, 2)


def test_its_mistakes(summed: Strategy) -> None:
    with pytest.raises(UnknownTerm, match="did you mean 'summed=4'"):
        Strategy.parse("sumed=4")
    with pytest.raises(UnknownTerm, match="takes no suffix"):
        Strategy.parse("summed:grad-op")
    unused = describe(tiny_jobs.partial)
    with pytest.raises(Refused, match=r"summed waits for the gradient of unused\.weight"):
        check(tiny_jobs.partial, unused, summed, place_for("cpu", 2))


def test_its_plan(summed: Strategy) -> None:
    planner = Planner(JOB, facts(), JOB.global_batch)
    ranking = rank(planner, CLUSTER, PlanOptions(strategies=("summed", "ddp", "zero1"), fast=True))
    plans = {str(plan.strategy.data): plan for plan in ranking.plans}
    assert not ranking.refused
    assert plans["summed"].forecast.memory["optimizer"] == plans["ddp"].forecast.memory["optimizer"]
    assert plans["summed"].forecast.memory["optimizer"] == 2 * plans["zero1"].forecast.memory["optimizer"]
    assert plans["summed"].forecast.step > plans["ddp"].forecast.step * 0.99


def test_it_is_considered_unasked(summed: Strategy) -> None:
    found = candidates(facts(), CLUSTER, JOB.global_batch, Allowed())
    assert "summed" in {strategy.data for strategy in found}
    assert "summed" in plain_strategies(2)


def test_its_layout(summed: Strategy) -> None:
    document = show_layout(JOB, facts(), Strategy.parse("summed"), 2)
    assert (document["strategy"], document["mesh"]) == ("summed=2", {"data": 2})


@pytest.mark.parametrize("framework", ["accelerate", "deepspeed", "torchtitan"])
def test_no_other_framework_has_it(summed: Strategy, framework: str) -> None:
    with pytest.raises(ExchangeError, match="summed=2 cannot be exported"):
        export(subject(summed), framework)


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_launchers_start_it(summed: Strategy, launcher: str) -> None:
    assert "summed=2" in export(subject(summed), launcher).text


def test_deepspeed_refuses_it(summed: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: True)
    asked = Strategy.parse("summed=2,engine=deepspeed")
    reason = data_strategy(asked).refuse(asked, facts(), place_for("cpu", 2))
    assert reason is not None and "DeepSpeed has no summed" in reason and "use ddp" in reason


def test_it_trains_as_plain_pytorch_does(two_ranks: RankPool) -> None:
    found = two_ranks(made_up_strategy.verdicts, facts())[0]
    assert [verdict.strategy for verdict in found] == ["summed", "summed,mb=1", "in-one-process"]
    assert all(verdict.equal for verdict in found), found


@pytest.mark.parametrize(("source", "target"), [("summed", "ddp"), ("ddp", "summed")])
def test_its_checkpoint_moves(two_ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    arrival = two_ranks(made_up_strategy.move, facts(), source, target, str(tmp_path))[0]
    assert arrival.changed is None
    assert arrival.distance is not None and arrival.distance.ratio <= 1.0
