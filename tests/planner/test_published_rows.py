"""The planner against published runs, which lie beside the project and not in it."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.scores import Outcome, score
from meshwright.validation import validate_rows

ROWS = Path(__file__).parents[3] / "shared" / "validation" / "published_rows.csv"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ROWS.exists(), reason="the published runs are not beside this checkout (../shared/validation)"
    ),
]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return validate_rows(ROWS)


@pytest.fixture(scope="module")
def scores(outcomes: list[Outcome]) -> dict[str, Any]:
    return score(outcomes)


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


def test_refused_rows_say_why(outcomes: list[Outcome]) -> None:
    assert all(outcome.reason for outcome in outcomes if not outcome.fits)
