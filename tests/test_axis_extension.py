"""A model axis is one file and one line: a made-up one goes everywhere, with no other file touched."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import made_up_axis
import tiny_jobs
from made_up_axis import Wide
from made_up_strategy import registered
from meshwright.api.job_planner import Planner, PlanOptions
from meshwright.api.plan import rank
from meshwright.assemble.check import check
from meshwright.commands.layout import show_layout
from meshwright.describe.model import describe
from meshwright.errors import ContradictoryTerms, ExchangeError, Refused, UnknownTerm
from meshwright.exchange import export
from meshwright.exchange.export_request import ExportRequest
from meshwright.facts.cluster import Cluster
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import MODEL_AXES
from meshwright.facts.strategy import Strategy
from meshwright.planner.candidates import Allowed, candidates
from meshwright.runtime.place import place_for
from meshwright.strategies import data_strategy
from meshwright.strategies.deepspeed import package
from meshwright.verify.strategy_choice import plain_strategies
from rank_pool import RankPool

JOB = tiny_jobs.transformer
CLUSTER = Cluster.parse("2xA100-40GB")


@cache
def facts() -> ModelFacts:
    return describe(JOB)


@pytest.fixture
def wide() -> Iterator[Strategy]:
    with registered(Wide()):
        yield Strategy.parse("wide=2").resolve(2)


def subject(strategy: Strategy) -> ExportRequest:
    return ExportRequest(strategy=strategy, ranks=2, job="job.py", global_batch=8)


def test_nothing_is_left_of_it() -> None:
    before = dict(MODEL_AXES)
    with registered(Wide()):
        assert "wide" in MODEL_AXES
    assert before == MODEL_AXES
    with pytest.raises(UnknownTerm, match="'wide=2'"):
        Strategy.parse("wide=2")


@pytest.mark.parametrize("text", ["wide=2", "fsdp=2,pp=2:1f1b,wide=4,bf16", "ddp,pp=2:zb,wide=2,mb=1"])
def test_its_text(wide: Strategy, text: str) -> None:
    parsed = Strategy.parse(text)
    assert str(parsed) == text
    assert [term.word for term in parsed.inner_axes] == ["wide"]


def test_its_mistakes(wide: Strategy) -> None:
    with pytest.raises(UnknownTerm, match="did you mean 'wide=4'"):
        Strategy.parse("wid=4")
    with pytest.raises(UnknownTerm, match="takes no suffix"):
        Strategy.parse("wide=2:1f1b")
    with pytest.raises(ContradictoryTerms, match=r"'single' and 'wide=2'"):
        Strategy.parse("single,wide=2")
    with pytest.raises(ContradictoryTerms, match=r"'tp=2' and 'wide=2' exclude each other: both divide parameters"):
        Strategy.parse("tp=2,wide=2")
    with pytest.raises(Refused, match=r"wide=3 needs a multiple of 3 ranks, but 2 were given; wide=2 would fit"):
        Strategy.parse("wide=3").resolve(2)
    with pytest.raises(Refused, match=r"wide=64 divides linear layers, and none has outputs that 64 divides"):
        check(JOB, facts(), Strategy.parse("wide=64"), place_for("cpu", 64))
    with pytest.raises(Refused, match="autocast does not reach into the layers that wide divides"):
        check(JOB, facts(), Strategy.parse("wide=2,bf16:autocast"), place_for("cpu", 2))


def test_its_plan(wide: Strategy) -> None:
    planner = Planner(JOB, facts(), JOB.global_batch)
    ranking = rank(planner, CLUSTER, PlanOptions(strategies=("wide=2", "ddp"), fast=True))
    plans = {str(plan.strategy).partition("=")[0]: plan.forecast for plan in ranking.plans}
    assert not ranking.refused
    assert plans["ddp"].memory["optimizer"] / 2 <= plans["wide"].memory["optimizer"] < plans["ddp"].memory["optimizer"]
    assert plans["wide"].time["wide"] > 0
    assert "wide" not in plans["ddp"].time or plans["ddp"].time["wide"] == 0


def test_it_is_considered_unasked(wide: Strategy) -> None:
    found = {str(strategy.axes[0]) for strategy in candidates(facts(), CLUSTER, 8, Allowed()) if strategy.axes}
    assert "wide=2" in found
    assert "wide=2" in plain_strategies(2)


def test_its_layout(wide: Strategy) -> None:
    document = show_layout(JOB, facts(), wide, 2)
    assert (document["strategy"], document["mesh"]) == ("wide=2", {"wide": 2})
    assert document["wide"]
    hybrid = show_layout(JOB, facts(), Strategy.parse("fsdp,wide=2,pp=2"), 8)
    assert hybrid["mesh"] == {"pipeline": 2, "data": 2, "wide": 2}


@pytest.mark.parametrize("framework", ["accelerate", "deepspeed", "torchtitan"])
def test_no_other_framework_has_it(wide: Strategy, framework: str) -> None:
    with pytest.raises(ExchangeError, match="wide=2 cannot be exported"):
        export(subject(wide), framework)


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_launchers_start_it(wide: Strategy, launcher: str) -> None:
    assert "wide=2" in export(subject(wide), launcher).text


def test_deepspeed_refuses_it(wide: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: True)
    asked = Strategy.parse("wide=2,engine=deepspeed")
    reason = data_strategy(asked).refuse(asked, facts(), place_for("cpu", 2))
    assert reason is not None and reason.startswith("wide=2 runs on our own engine only")


def test_it_trains_as_plain_pytorch_does(two_ranks: RankPool) -> None:
    found = two_ranks(made_up_axis.verdicts, facts())[0]
    assert len(found) == 3 and all(verdict.equal for verdict in found), found


def test_its_hybrids_train_as_plain_pytorch_does(four_ranks: RankPool) -> None:
    found = four_ranks(made_up_axis.hybrids, facts())[0]
    assert len(found) == 3 and all(verdict.equal for verdict in found), found


@pytest.mark.parametrize(("source", "target"), [("wide=2", "ddp"), ("ddp", "wide=2")])
def test_its_checkpoint_moves(two_ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    arrival = two_ranks(made_up_axis.move, facts(), source, target, str(tmp_path))[0]
    assert arrival.changed is None
    assert arrival.distance is not None and arrival.distance.ratio <= 1.0
