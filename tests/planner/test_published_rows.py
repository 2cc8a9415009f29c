"""The planner against published runs, which lie beside the project and not in it."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.validate import validate_rows
from meshwright.planner.scores import ScoredRun, score

ROWS = Path(__file__).parents[3] / "shared" / "validation" / "published_rows.csv"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ROWS.exists(), reason="the published runs are not beside this checkout (../shared/validation)"
    ),
]


@pytest.fixture(scope="module")
def outcomes() -> list[ScoredRun]:
    return validate_rows(ROWS)


MANY = 128
"""Devices up to which, and beyond which, forecasts are also held to bounds of their own."""


@pytest.fixture(scope="module")
def scores(outcomes: list[ScoredRun]) -> dict[str, Any]:
    return score(outcomes)


@pytest.fixture(scope="module")
def beyond(outcomes: list[ScoredRun]) -> dict[str, Any]:
    return score([outcome for outcome in outcomes if outcome.row.cluster.devices > MANY])


@pytest.fixture(scope="module")
def within(outcomes: list[ScoredRun]) -> dict[str, Any]:
    return score([outcome for outcome in outcomes if outcome.row.cluster.devices <= MANY])


def test_memory(scores: dict[str, Any]) -> None:
    assert scores["memory"]["n"] > 400
    assert scores["memory"]["mape"] < 0.07
    assert scores["memory"]["median_abs"] < 0.043


def test_time(scores: dict[str, Any]) -> None:
    assert scores["time"]["n"] > 500
    assert scores["time"]["mape"] < 0.15
    assert scores["time"]["median_abs"] < 0.06


def test_who_fits(scores: dict[str, Any]) -> None:
    assert scores["fit"]["recall"] > 0.88
    assert scores["fit"]["false_alarm"] < 0.015


def test_the_first_choice_is_near_the_best(scores: dict[str, Any]) -> None:
    assert scores["regret"]["cells"] >= 6
    assert scores["regret"]["median"] < 0.05


def test_few_nodes(within: dict[str, Any]) -> None:
    assert within["memory"]["mape"] < 0.07
    assert within["memory"]["median_abs"] < 0.04
    assert within["time"]["mape"] < 0.15


def test_many_nodes(beyond: dict[str, Any]) -> None:
    if not beyond["rows"]:
        pytest.skip("the published runs beside this checkout end at 16 nodes")
    assert beyond["memory"]["mape"] < 0.075
    assert beyond["time"]["mape"] < 0.165
    assert beyond["fit"]["recall"] > 0.9 and beyond["fit"]["false_alarm"] < 0.01


def test_no_bias_by_nodes(outcomes: list[ScoredRun]) -> None:
    """Half of the forecasts for each number of nodes are too fast, half too slow, or nearly."""
    by_nodes: dict[int, list[ScoredRun]] = {}
    for outcome in outcomes:
        by_nodes.setdefault(outcome.row.cluster.nodes, []).append(outcome)
    biases = {nodes: score(runs)["time"]["median_signed"] for nodes, runs in by_nodes.items()}
    assert {nodes: bias for nodes, bias in biases.items() if bias is not None and abs(bias) > 0.15} == {}


def test_error_bars_cover_what_they_claim_on_sources_that_they_were_made_without(outcomes: list[ScoredRun]) -> None:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    error_bars = import_module("error_bars")
    observed = error_bars.all_runs(outcomes)
    held_out = error_bars.held_out(observed)
    for of in (held_out["held_out"], *held_out["held_out_by_model"].values()):
        covered = [found["covered"] for grade in of.values() for found in grade.values()]
        assert all(abs(share - error_bars.COVERAGE) < 0.15 for share in covered)
    table = error_bars.table_of(observed)
    inside = [
        abs(error) <= error_bars.read_bars(table, row.grade, row.scope).bar[quantity]
        for row in observed
        for quantity, error in row.errors.items()
    ]
    assert sum(inside) / len(inside) == pytest.approx(error_bars.COVERAGE, abs=0.04)


def test_refused_rows_say_why(outcomes: list[ScoredRun]) -> None:
    assert all(outcome.reason for outcome in outcomes if not outcome.fits)
