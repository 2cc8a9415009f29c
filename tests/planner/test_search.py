"""Candidates, refusals, ranking and the words for it."""

from dataclasses import replace

import pytest

import tiny_jobs
from meshwright.api.described_presets import describe_job
from meshwright.api.job_planner import Planner, PlanOptions, open_planner
from meshwright.api.plan import plan as plan_by_api
from meshwright.api.plan import rank
from meshwright.api.setup import resolve_auto
from meshwright.errors import Refused
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.plan import Plan, Ranking
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Trace
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.candidates import Allowed, candidates, complexity
from meshwright.planner.search import TIE, search
from planned import described, plan

FAST = PlanOptions(fast=True)
SMALL = Shape(layers=8, width=1024, heads=16, kv_heads=16, feed_forward=4096, vocabulary=32000, length=1024)


@pytest.fixture(scope="module")
def job() -> Job:
    return decoder_job(SMALL, global_batch=64)


@pytest.fixture(scope="module")
def ranking(job: Job) -> Ranking:
    return plan_by_api(job, Cluster.parse("8xA100-40GB"), FAST, name="small")


def test_the_api_ranks_as_a_planner_that_is_kept(job: Job, ranking: Ranking) -> None:
    again = plan(job, Cluster.parse("8xA100-40GB"), FAST)
    assert replace(again, job=ranking.job, seconds=ranking.seconds) == ranking


def test_plans_fit_and_come_fastest_first_but_for_ties(ranking: Ranking) -> None:
    steps = [found.forecast.step for found in ranking.plans]
    assert all(found.fits for found in ranking.plans)
    assert steps[1:] == sorted(steps[1:])
    assert steps[0] <= (1 + TIE) * min(steps)


def test_every_candidate_is_a_plan_or_has_a_reason(ranking: Ranking) -> None:
    assert ranking.candidates > 500
    assert all(refusal.reason for refusal in ranking.refused)
    assert len({refusal.strategy for refusal in ranking.refused}) == len(ranking.refused)


def test_in_a_search_over_all_only_what_fits_is_timed() -> None:
    known, cluster = describe_job("preset:gpt2-xl"), Cluster.parse("8xT4")
    planner = Planner(known.job, known.facts, 64, costs=known.costs)
    allowed = Allowed(precisions=("fp16",))
    planner.search(cluster, PlanOptions(allowed=allowed))
    context, all_of_them = planner.context(cluster), list(candidates(known.facts, cluster, 64, allowed))
    quick, whole = (search(context, all_of_them, time_all=time_all) for time_all in (False, True))
    assert quick.plans == whole.plans and quick.refused == whole.refused and quick.plans and quick.unfit
    assert not any(found.forecast.time for found in quick.unfit)
    assert all(found.forecast.step > 0 and found.speed.mfu > 0 for found in whole.unfit)
    assert [found.peak for found in quick.unfit] == [found.peak for found in whole.unfit]


def test_a_small_model_is_replicated(ranking: Ranking) -> None:
    """Nothing is gained by cutting what fits whole, or by gathering it twice; dividing the update saves a little."""
    first = ranking.plans[0].strategy
    assert first.data in ("ddp", "zero1") or first.variant == "grad-op"
    assert (first.axes, first.offload, first.recompute) == ((), "", "none")


def test_causes_add_up(ranking: Ranking) -> None:
    for shown in ranking.to_json()["plans"]:
        assert sum(shown["memory"].values()) == pytest.approx(shown["reserved_gib"])
        assert sum(shown["time"].values()) == pytest.approx(shown["step_ms"])
        assert shown["peak_gib"] <= shown["reserved_gib"]


def test_rivals_say_what_they_would_cost(job: Job) -> None:
    names = ("fsdp:grad-op,bf16,mb=8", "fsdp,bf16,mb=8", "ddp,bf16,mb=8", "ddp,bf16,mb=8,ac=full", "tp=8,bf16,mb=8")
    first, *rivals = plan(job, Cluster.parse("8xA100-40GB"), PlanOptions(fast=True, strategies=names)).plans
    slower = [found.forecast.step > (1 + TIE) * first.forecast.step for found in rivals]
    assert first.why and set(slower) == {True, False}
    assert slower == [" cost " in found.why[0] for found in rivals]


def test_a_plan_survives_json(ranking: Ranking) -> None:
    assert all(Plan.from_json(found.to_json()) == found for found in ranking.plans)


def test_only_what_is_named(job: Job) -> None:
    found = plan(
        job, Cluster.parse("8xA100-40GB"), PlanOptions(fast=True, strategies=("fsdp,bf16", "tp=8,bf16", "tp=16,bf16"))
    )
    assert {str(each.strategy) for each in found.plans} == {"fsdp=8,bf16", "tp=8,bf16"}
    assert "tp=16" in found.refused[0].strategy


def test_every_named_strategy_is_answered(job: Job) -> None:
    fitting = {"ddp=2,ac=full,mb=4", "ddp=2,mb=4", "ddp=2,offload=optimizer,mb=4", "pp=2:1f1b"}
    others = {"pp=2:1f1b,offload=params", "ddp,fp8", "ddp,mb=32", "tp=3"}
    names = (*sorted(others), *sorted(fitting))
    found = plan(job, Cluster.parse("2xA100-40GB"), PlanOptions(fast=True, strategies=names, listed=1))
    assert {str(each.strategy) for each in found.plans} == fitting
    assert {refusal.strategy for refusal in found.refused} == others
    steps = [each.forecast.step for each in found.plans]
    assert steps == sorted(steps)


def test_a_named_strategy_whose_traced_step_does_not_fit_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object, **__: object) -> list[Trace]:
        return [Trace(rank=0, ranks=2, memory={"activations": 90 * 2**30}, reserved=90 * 2**30)]

    monkeypatch.setattr("meshwright.tracing.trace_roles", too_large)
    found = plan(job, Cluster.parse("2xA100-40GB"), PlanOptions(strategies=("ddp,mb=4", "fsdp,mb=4")))
    assert not found.plans
    assert [refusal.reason.split(":")[0] for refusal in found.refused] == ["needs 90.0 of 37.2 GiB"] * 2


def test_a_precision_without_units_is_refused_by_name(job: Job) -> None:
    found = plan(job, Cluster.parse("2xA100-40GB"), PlanOptions(fast=True, strategies=("ddp,fp8",)))
    assert not found.plans
    assert found.refused[0].strategy == "ddp,fp8"
    assert found.refused[0].reason == "A100-40GB has no units for fp8; use fp32 or bf16 or fp16."
    with pytest.raises(Refused, match="No candidate can run here"):
        resolve_auto(tiny_jobs.transformer, "auto,fp8", ranks=2, device="cpu")


def test_nothing_fits_and_what_would() -> None:
    options = PlanOptions(fast=True, global_batch=8)
    found = rank(open_planner("preset:llama3-70b", options), Cluster.parse("8xA100-40GB"), options)
    assert not found.plans
    assert "Nothing fits" in found.advice[0]
    assert any("times the nodes" in sentence for sentence in found.advice)


def test_bf16_is_refused_where_a_device_has_none(job: Job) -> None:
    found = plan(job, Cluster.parse("8xV100-16GB"), FAST)
    assert not found.plans
    assert "no units for bf16" in found.refused[0].reason


def test_candidates_are_resolved_and_legal(job: Job) -> None:
    cluster = Cluster.parse("2x4xA100-40GB")
    found = list(candidates(described(job)[0], cluster, 64, Allowed()))
    assert len(found) == len(set(found))
    assert {strategy.resolve(8).data for strategy in found} >= {"ddp", "zero1", "zero2", "fsdp", "hsdp"}
    assert max(strategy.inner_ranks for strategy in found) == 4


def test_plainer_is_simpler() -> None:
    order = ["ddp", "zero1", "fsdp", "tp=2,ddp", "pp=2:1f1b,ddp", "tp=2,pp=2:zbv,fsdp,ac=full"]
    scores = [complexity(Strategy.parse(text)) for text in order]
    assert scores == sorted(scores)


def test_auto_is_a_strategy_for_the_ranks_that_there_are() -> None:
    chosen = resolve_auto(tiny_jobs.transformer, "auto,ac=full", ranks=2, device="cpu")
    assert not chosen.auto
    assert chosen.resolve(2) == chosen
    assert (chosen.recompute, chosen.precision) == ("full", "fp32")
    assert resolve_auto(tiny_jobs.transformer, "fsdp", ranks=2, device="cpu") == Strategy.parse("fsdp")


def test_of_named_strategies_that_tie_the_simplest_leads() -> None:
    options = PlanOptions(strategies=("dp", "ddp"), fast=True)
    found = plan(tiny_jobs.transformer, Cluster.parse("2xA100-40GB"), options)
    assert [str(one.strategy) for one in found.plans] == ["ddp=2", "dp=2"]
