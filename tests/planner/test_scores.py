"""The first choice among measured runs that are alternatives to each other."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.planner.scores import ScoredRun, score

FAST, SLOW = 1.0, 1.3
"""Seconds a step, as forecast."""


def _run(seconds: float, speed: float | None, *, safely: bool, fits: bool = True) -> ScoredRun:
    """A run of one cell; without a measured speed it crashed."""
    row: Any = SimpleNamespace(
        cell="cell", shape="shape", tokens_per_s=speed, fits=speed is not None, peak_gib=None, step=None
    )
    row.step_layout = SimpleNamespace(samples=8)
    account: Any = SimpleNamespace(timing=SimpleNamespace(total=seconds))
    return ScoredRun(row=row, account=account, fits=fits, safely=safely)


@pytest.mark.parametrize(
    ("runs", "regret"),
    [
        ([_run(FAST, None, safely=False), _run(SLOW, 100.0, safely=True)], 0.0),  # a run that crashes is not risked
        ([_run(FAST, 125.0, safely=False), _run(SLOW, 100.0, safely=True)], 0.25),  # which costs this if it does not
        ([_run(FAST, None, safely=True), _run(SLOW, 100.0, safely=True)], 1.0),
        ([_run(FAST, 100.0, safely=False), _run(SLOW, 80.0, safely=False)], 0.0),  # nothing fits safely
        ([_run(FAST, 100.0, safely=False, fits=False), _run(SLOW, 80.0, safely=True)], 0.25),
    ],
)
def test_the_first_choice_fits_safely(runs: list[ScoredRun], regret: float) -> None:
    assert score(runs)["regret"]["median"] == pytest.approx(regret)
