"""The planner against published runs, which lie beside the project and not in it."""

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
"""Devices up to which forecasts are held to the bounds of the docs; those for more are held to others."""


@pytest.fixture(scope="module")
def scores(outcomes: list[ScoredRun]) -> dict[str, Any]:
    return score([outcome for outcome in outcomes if outcome.row.cluster.devices <= MANY])


@pytest.fixture(scope="module")
def beyond(outcomes: list[ScoredRun]) -> dict[str, Any]:
    return score([outcome for outcome in outcomes if outcome.row.cluster.devices > MANY])


def test_memory(scores: dict[str, Any]) -> None:
    assert scores["memory"]["n"] > 400
    assert scores["memory"]["mape"] < 0.08
    assert scores["memory"]["median_abs"] < 0.05


def test_time(scores: dict[str, Any]) -> None:
    assert scores["time"]["n"] > 500
    assert scores["time"]["mape"] < 0.18
    assert scores["time"]["median_abs"] < 0.10


def test_who_fits(scores: dict[str, Any]) -> None:
    assert scores["fit"]["recall"] > 0.75
    assert scores["fit"]["false_alarm"] < 0.03


def test_the_first_choice_is_near_the_best(scores: dict[str, Any]) -> None:
    assert scores["regret"]["cells"] >= 6
    assert scores["regret"]["median"] < 0.05


def test_many_nodes(beyond: dict[str, Any]) -> None:
    if not beyond["rows"]:
        pytest.skip("the published runs beside this checkout end at 16 nodes")
    assert beyond["memory"]["mape"] < 0.10
    assert beyond["time"]["mape"] < 0.25
    assert beyond["fit"]["recall"] > 0.9 and beyond["fit"]["false_alarm"] < 0.01


def test_no_bias_by_nodes(outcomes: list[ScoredRun]) -> None:
    """Half of the forecasts for each number of nodes are too fast, half too slow, or nearly."""
    by_nodes: dict[int, list[ScoredRun]] = {}
    for outcome in outcomes:
        by_nodes.setdefault(outcome.row.cluster.nodes, []).append(outcome)
    biases = {nodes: score(runs)["time"]["median_signed"] for nodes, runs in by_nodes.items()}
    assert {nodes: bias for nodes, bias in biases.items() if bias is not None and abs(bias) > 0.15} == {}


def test_refused_rows_say_why(outcomes: list[ScoredRun]) -> None:
    assert all(outcome.reason for outcome in outcomes if not outcome.fits)
