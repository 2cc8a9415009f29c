"""Factors are found again in rows that were made with them."""

from dataclasses import replace

import pytest

from meshwright.describe.model import describe
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import AxisTerm
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.planner.account import account
from meshwright.planner.calibrate import Calibration, calibrate
from meshwright.planner.measured_runs import MeasuredRun
from meshwright.planner.scores import ScoredRun
from meshwright.planner.stage_costs import StageCosts
from meshwright.planner.step_layout import StepLayout
from meshwright.tracing.costs import measure_costs
from meshwright.units import GIB

CLUSTER = Cluster.parse("2x8xA100-80GB")
SHAPE = Shape(layers=4, width=1024, heads=16, kv_heads=16, feed_forward=4096, vocabulary=32000, length=1024)


@pytest.fixture(scope="module")
def stage_costs() -> StageCosts:
    job = decoder_job(SHAPE, global_batch=64)
    facts = describe(job)
    return StageCosts(facts, {("bf16", "none"): measure_costs(job, facts, "bf16")}, hardware_of(CLUSTER))


def made(stage_costs: StageCosts, truth: Calibration, step_layout: StepLayout, name: str) -> ScoredRun:
    """A row as it would be measured if `truth` were the truth."""
    found = account(step_layout, stage_costs, hardware_of(CLUSTER), 8)
    measured = truth.apply(replace(found, fullest=0).forecast)
    samples = step_layout.data * step_layout.micro_batch * step_layout.micro_batches
    row = MeasuredRun(
        name=name,
        arch="small",
        shape=SHAPE,
        cluster=CLUSTER,
        step_layout=step_layout,
        fits=True,
        tokens_per_s=samples * SHAPE.length / measured.step / 16,
        peak_gib=measured.peak / GIB,
    )
    return ScoredRun(row=row, account=found, fits=True)


def outcomes(stage_costs: StageCosts, truth: Calibration) -> list[ScoredRun]:
    sizes = [
        (data, inner, size, count)
        for data, inner in ((16, ()), (2, (AxisTerm("tp", 8),)), (4, (AxisTerm("tp", 4),)))
        for size, count in ((1, 4), (4, 1), (16, 1))
    ]
    return [
        made(
            stage_costs,
            truth,
            StepLayout(data=data, inner=inner, micro_batch=size, micro_batches=count),
            f"row {index}",
        )
        for index, (data, inner, size, count) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    "truth", [Calibration(compute=1.5), Calibration(links=2.0, memory=1.2), Calibration(compute=0.8, host=1.6)]
)
def test_factors_are_found_again(stage_costs: StageCosts, truth: Calibration) -> None:
    found = calibrate(outcomes(stage_costs, truth))
    assert found.compute == pytest.approx(truth.compute, rel=0.1)
    assert found.links == pytest.approx(truth.links, rel=0.15)
    assert found.host == pytest.approx(truth.host, rel=0.15)
    assert found.memory == pytest.approx(truth.memory, rel=0.05)
    assert found.rows == 9


def test_what_is_right_stays(stage_costs: StageCosts) -> None:
    found = calibrate(outcomes(stage_costs, Calibration()))
    assert (found.compute, found.links, found.host, found.memory) == pytest.approx((1, 1, 1, 1), abs=0.01)


def test_one_row_that_went_wrong_does_not_matter(stage_costs: StageCosts) -> None:
    rows = outcomes(stage_costs, Calibration(compute=1.5))
    wrong = replace(rows[0], row=replace(rows[0].row, tokens_per_s=rows[0].row.tokens_per_s / 20))  # type: ignore[operator]
    assert calibrate([wrong, *rows[1:]]).compute == pytest.approx(1.5, rel=0.15)


def test_it_says_what_it_fitted() -> None:
    assert "67%" in Calibration(compute=1.5, rows=3).sentences()[0]
    assert "nothing" in Calibration(rows=3).sentences()[0]
