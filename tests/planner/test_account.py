"""The quick grade of forecast against papers, and against a trace of the very step."""

from dataclasses import replace

import pytest

from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.account import usable
from meshwright.planner.candidates import Allowed, candidates, complexity
from meshwright.planner.collectives import RankGroup
from meshwright.planner.memory import forecast_memory
from meshwright.planner.search import PlanContext, consider
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.step_layout import StepLayout, lay_out_step
from meshwright.tracing import trace_step
from promised_states import promised_states

GIB = 2**30
SMALL = Shape(layers=4, width=512, heads=8, kv_heads=8, feed_forward=2048, vocabulary=8192, length=512)
EIGHT = Cluster.parse("8xH100-80GB")


@pytest.fixture(scope="module")
def job() -> Job:
    return decoder_job(SMALL, global_batch=64)


@pytest.fixture(scope="module")
def facts(job: Job) -> ModelFacts:
    return describe(job)


@pytest.fixture(scope="module")
def planner(job: Job, facts: ModelFacts) -> Planner:
    made = Planner(job, facts, job.global_batch)
    for recompute in ("none", "selective", "full"):
        made.measure("bf16", recompute)
    made.measure("fp32", "none")
    return made


@pytest.mark.parametrize(
    ("over", "gigabytes"), [((1, 1, 1), 120.0), ((1, 1, 64), 31.4), ((1, 64, 64), 16.6), ((64, 64, 64), 1.9)]
)
def test_the_zero_paper_s_table(
    planner: Planner, facts: ModelFacts, over: tuple[int, int, int], gigabytes: float
) -> None:
    """States of 7.5 billion parameters on 64 ranks, mixed precision Adam: whole, stage 1, stage 2, stage 3."""
    parameters, gradients, optimizer = over
    step_layout = StepLayout(
        data=64,
        shards=64,
        micro_batch=1,
        micro_batches=1,
        parameters_over=parameters,
        gradients_over=gradients,
        optimizer_over=optimizer,
        parameter_bytes=2,
        gradient_bytes=2,
        master_bytes=4,
        moment_bytes=8,
    )
    held = forecast_memory(step_layout, planner.context(EIGHT).stage_costs)[0].memory
    states = held["parameters"] + held["gradients"] + held["optimizer"]
    count = sum(parameter.count for parameter in facts.parameters)
    # The paper prints one decimal.
    assert states / count * 7.5 == pytest.approx(gigabytes, rel=0.01, abs=0.03)


@pytest.mark.parametrize(
    ("strategy", "bound"),
    [
        ("ddp,bf16", 0.02),
        ("ddp,fp32", 0.02),
        ("zero1,bf16", 0.03),
        ("zero2,bf16,reduce=bf16", 0.03),
        ("fsdp,bf16", 0.01),
        ("fsdp,bf16,reduce=bf16", 0.01),
        ("fsdp:grad-op,bf16", 0.01),
        ("hsdp=2x4,bf16", 0.01),
        ("fsdp,bf16,ac=full", 0.01),
        ("fsdp,bf16,ac=selective", 0.01),
        ("tp=8,bf16", 0.10),
    ],
)
def test_account_and_trace_agree(planner: Planner, job: Job, facts: ModelFacts, strategy: str, bound: float) -> None:
    resolved = Strategy.parse(strategy).resolve(8)
    account = consider(planner.context(EIGHT), resolved)
    trace = trace_step(job, facts, resolved, ranks=8)
    assert account.peak == pytest.approx(trace.peak, rel=bound)


def test_memory_does_not_shrink_with_the_micro_batch(planner: Planner) -> None:
    peaks = [consider(planner.context(EIGHT), Strategy.parse(f"fsdp,bf16,mb={n}")).peak for n in (1, 2, 4, 8)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_recomputing_saves_memory_and_costs_time(planner: Planner) -> None:
    plain, full = (consider(planner.context(EIGHT), Strategy.parse(f"fsdp,bf16,mb=8{ac}")) for ac in ("", ",ac=full"))
    assert full.peak < plain.peak
    assert full.forecast.time["compute"] > 1.2 * plain.forecast.time["compute"]


def test_a_pipeline_s_first_rank_has_most_in_flight(planner: Planner) -> None:
    plan = consider(planner.context(EIGHT), Strategy.parse("pp=4:1f1b,ddp,bf16,mb=1"))
    kept = [stage.memory["activations"] for stage in plan.stages]
    assert len(kept) == 4
    assert kept[0] > kept[2]
    assert plan.forecast.time["bubble"] > 0


def test_states_are_those_that_the_strategy_promises(planner: Planner, facts: ModelFacts) -> None:
    for text in ("ddp", "zero1", "zero2", "fsdp"):
        # With several micro-batches gradients are there at the fullest moment.
        strategy = Strategy.parse(f"{text},fp32,mb=1").resolve(8)
        promised = promised_states(facts, strategy)
        found = consider(planner.context(EIGHT), strategy).forecast
        for cause in ("parameters", "optimizer"):
            assert found.memory[cause] == pytest.approx(promised[cause], rel=0.02)


def test_one_process_for_all_devices_is_fuller_and_slower_than_ddp(planner: Planner) -> None:
    ddp, dp = (consider(planner.context(EIGHT), Strategy.parse(text)).forecast for text in ("ddp", "dp"))
    assert dp.memory["logits"] == pytest.approx(8 * ddp.memory["logits"], rel=0.01)
    assert dp.memory["optimizer"] == ddp.memory["optimizer"]
    assert dp.time["data"] > ddp.time["data"]
    assert complexity(Strategy.parse("dp=8")) > complexity(Strategy.parse("ddp=8"))  # of equals ddp is recommended
    in_four = consider(planner.context(EIGHT), Strategy.parse("dp,mb=32")).forecast
    assert in_four.time["data"] == pytest.approx(planner.global_batch / 32 * dp.time["data"])
    with pytest.raises(Refused, match="dp runs in one process, which has 8 of the 16 devices"):
        consider(planner.context(Cluster.parse("2x8xH100-80GB")), Strategy.parse("dp"))


def test_a_device_is_not_all_for_tensors() -> None:
    hardware = hardware_of(EIGHT)
    assert 0.9 * hardware.memory < usable(hardware) < hardware.memory


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "fsdp,mb=1", "zero1,mb=1"])
def test_gradients_that_are_reduced_in_bf16_take_half_the_link(planner: Planner, strategy: str) -> None:
    """On a link so slow that nothing hides the messages."""
    slow = planner.context(Cluster.parse("8x1xH100-80GB"))
    slow = replace(slow, hardware=replace(slow.hardware, between=replace(slow.hardware.between, bandwidth=1e8)))
    costs = StageCosts(slow.facts, planner._costs, slow.hardware)
    slow = replace(slow, stage_costs=costs)
    full, half = (consider(slow, Strategy.parse(f"{strategy},bf16{how}")) for how in ("", ",reduce=bf16"))
    ends = data_seconds(slow, strategy)
    assert full.forecast.time["data"] - half.forecast.time["data"] == pytest.approx(ends / 2, rel=0.1)
    assert half.forecast.memory["gradients"] == full.forecast.memory["gradients"]


def data_seconds(context: PlanContext, strategy: str) -> float:
    """Seconds of reducing all gradients in fp32."""
    resolved = Strategy.parse(f"{strategy},bf16").resolve(8)
    layout = lay_out_step(resolved, context.facts, context.global_batch)
    elements = context.stage_costs.of(layout)[0].trainable
    kind = "all_reduce" if layout.optimizer_over == 1 else "reduce_scatter"
    once = context.stage_costs.collective(kind, 4.0 * elements, RankGroup(8, 1, 8, 1))
    return once * (layout.micro_batches if layout.reduces_each else 1)


def test_the_planner_does_not_choose_how_gradients_are_rounded(facts: ModelFacts) -> None:
    assert {made.reduce for made in candidates(facts, EIGHT, 64, Allowed())} == {"fp32"}


def test_compile_is_searched_where_blocks_compile(facts: ModelFacts) -> None:
    found = [made for made in candidates(facts, EIGHT, 64, Allowed(compile=(True,))) if made.axes]
    assert {made.schedule for made in found} >= {"1f1b", "interleaved"}
    assert not any(made.inner_axes or made.schedule in ("zb", "zbv") for made in found)


def linked(planner: Planner, gigabits: float) -> PlanContext:
    """Two CPU ranks on separate nodes, whose sums within a node would take no time."""
    context = planner.context(Cluster.parse("2x1xcpu"))
    near, far = replace(context.hardware.within, bandwidth=1e12, latency=0.0), gigabits * 1e9 / 8
    link = replace(context.hardware.between, bandwidth=far, latency=0.0)
    sources = {**context.hardware.sources, "between.bandwidth": "measured", "within.bandwidth": "measured"}
    hardware = replace(context.hardware, within=near, between=link, sources=sources)
    costs = StageCosts(context.facts, planner._costs, hardware)
    return replace(context, hardware=hardware, stage_costs=costs)


def times_of(context: PlanContext, strategy: str) -> dict[str, float]:
    return dict(consider(context, Strategy.parse(strategy)).forecast.time)


def test_a_cpu_hides_none_of_fsdp_s_messages(planner: Planner) -> None:
    context = linked(planner, 1.0)
    resolved = Strategy.parse("fsdp,mb=8").resolve(2)
    layout = lay_out_step(resolved, context.facts, context.global_batch)
    stage, pair = context.stage_costs.of(layout)[0], RankGroup(2, 1, 2, 1)
    sums = sum(context.stage_costs.collective("all_reduce", 4.0 * unit.trainable, pair) for unit in stage.units)
    once = times_of(context, "fsdp,mb=8,sync=last")["data"]
    assert times_of(context, "fsdp,mb=8")["data"] - once == pytest.approx((layout.micro_batches - 1) * sums, rel=0.01)


def test_zero_hides_its_sums_unless_the_link_is_slow(planner: Planner) -> None:
    """What is left on a fast link is the sum of the last bucket, which holds all that is outside of blocks."""
    fast, slow = linked(planner, 100.0), linked(planner, 0.01)
    compute = times_of(fast, "zero2,mb=8")["compute"]
    each, last = (times_of(fast, f"zero2,mb=8{how}")["data"] for how in ("", ",sync=last"))
    assert 0 < each - last < 0.1 * compute
    each, last = (times_of(slow, f"zero2,mb=8{how}")["data"] for how in ("", ",sync=last"))
    assert each - last > compute


def test_gloo_s_own_work_is_not_hidden(planner: Planner) -> None:
    """On one node nothing is slower than that."""
    here = planner.context(Cluster.parse("2xcpu"))
    layout = lay_out_step(Strategy.parse("ddp").resolve(2), here.facts, here.global_batch)
    elements = here.stage_costs.of(layout)[0].trainable
    whole = here.stage_costs.collective("all_reduce", 4.0 * elements, RankGroup(2, 2, 1, 2))
    assert times_of(here, "ddp")["data"] == pytest.approx(whole, rel=0.1)
