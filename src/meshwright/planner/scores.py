"""Score forecasts against measured runs: errors of memory and time, what fits, and the regret of the first choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from meshwright.errors import BadInput
from meshwright.planner.account import Account
from meshwright.planner.measured_runs import MeasuredRun
from meshwright.units import GIB


@dataclass(frozen=True, kw_only=True)
class ScoredRun:
    """A measured run and the planner's forecast for it."""

    row: MeasuredRun
    account: Account | None
    """None if the run is refused."""
    fits: bool
    safely: bool = False
    """Whether it would fit even if the forecast of its memory were off by the usual error."""
    reason: str = ""
    """Why the run is refused or does not fit."""

    @property
    def memory_error(self) -> float | None:
        """Relative error. A pipeline's measurement is of its first rank, which prints it."""
        if self.account is None or self.row.peak_gib is None:
            return None
        return self.account.ranks[0].peak / GIB / self.row.peak_gib - 1

    @property
    def time_error(self) -> float | None:
        """Relative error of the step's seconds."""
        if self.account is None or self.row.step is None:
            return None
        return self.account.timing.total / self.row.step - 1


COUNTED: Mapping[str, Callable[[MeasuredRun], str]] = {
    "nodes": lambda row: str(row.cluster.nodes),
    "axes": lambda row: "+".join(row.axes) or "data",
}
"""Columns that every row has without naming them."""


def score_groups(outcomes: Sequence[ScoredRun], column: str) -> dict[str, Any]:
    """The scores of the rows with each value of a column, in the order in which the values appear.

    `BadInput` if no row has the column.
    """
    if column not in COUNTED and not any(column in outcome.row.columns for outcome in outcomes):
        known = ", ".join([*COUNTED, *outcomes[0].row.columns])
        raise BadInput(f"The rows have no column {column!r} to group by; they have {known}.")
    value_of = COUNTED.get(column) or (lambda row: row.columns.get(column, ""))
    groups: dict[str, list[ScoredRun]] = {}
    for outcome in outcomes:
        groups.setdefault(value_of(outcome.row), []).append(outcome)
    return {value: score(members) for value, members in groups.items()}


def score(outcomes: Sequence[ScoredRun]) -> dict[str, Any]:
    """All scores, in the form that `validate --json` prints."""
    return {
        "rows": len(outcomes),
        "memory": _errors(outcome.memory_error for outcome in outcomes),
        "time": _errors(outcome.time_error for outcome in outcomes),
        "fit": _fit(outcomes),
        "regret": _regret(outcomes),
    }


def _errors(found: Iterable[float | None]) -> dict[str, Any]:
    errors = [error for error in found if error is not None]
    if not errors:
        return {"n": 0, "mape": None, "median_abs": None, "median_signed": None}
    return {
        "n": len(errors),
        "mape": mean(map(abs, errors)),
        "median_abs": median(map(abs, errors)),
        "median_signed": median(errors),
    }


def _fit(outcomes: Sequence[ScoredRun]) -> dict[str, Any]:
    failed = [outcome for outcome in outcomes if not outcome.row.fits]
    ran = [outcome for outcome in outcomes if outcome.row.fits]
    return {
        "n": len(outcomes),
        "recall": mean(not outcome.fits for outcome in failed) if failed else None,
        "false_alarm": mean(not outcome.fits for outcome in ran) if ran else None,
    }


def _regret(outcomes: Sequence[ScoredRun]) -> dict[str, Any]:
    """In each cell, how much slower the measured run of our first choice is than the fastest measured run."""
    cells: dict[Any, list[ScoredRun]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.row.cell, outcome.row.shape), []).append(outcome)
    found = [_cell_regret(members) for members in cells.values() if len(members) > 1]
    regrets = sorted(regret for regret in found if regret is not None)
    if not regrets:
        return {"cells": 0, "median": None, "p90": None}
    return {
        "cells": len(regrets),
        "median": median(regrets),
        "p90": regrets[min(len(regrets) - 1, len(regrets) * 9 // 10)],
    }


def _cell_regret(members: list[ScoredRun]) -> float | None:
    speeds = [speed for outcome in members if (speed := outcome.row.tokens_per_s) is not None]
    known = [outcome for outcome in members if outcome.fits and outcome.account is not None]
    if not speeds or not known:
        return None
    # Where `plan` would trace the step, a row has nothing to trace: of 15 published runs forecast between what fits
    # safely and what fits at all, 9 crashed. So one of them is chosen only if there is no other.
    chosen = max(known, key=lambda outcome: (outcome.safely, _forecast_speed(outcome)))
    # A first choice that did not run has a regret of 100 %.
    if chosen.row.tokens_per_s is None:
        return None if chosen.row.fits else 1.0
    return max(speeds) / chosen.row.tokens_per_s - 1


def _forecast_speed(outcome: ScoredRun) -> float:
    assert outcome.account is not None
    return outcome.row.step_layout.samples / outcome.account.timing.total
