"""Fit the planner's efficiencies to runs that the user measured.

A forecast knows what a run computes, sends and keeps. The speed of the user's devices and links may differ from the
catalogue by a factor. Three factors for time and one for memory are fitted, each only if the rows determine it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.facts.forecast import Forecast
from meshwright.planner.scores import ScoredRun
from meshwright.planner.step_layout import inner_causes

KEPT = ("activations", "logits", "temporary", "gathered", "allocator")
"""Causes that the memory factor scales. Model states are not among them: they are counted, not estimated."""
LEAST = 0.02
"""Smallest mean share of the step at which a factor is fitted."""
BOUNDS = (0.2, 5.0)
ROUNDS = 25
PRIOR = 0.02
"""Weight of a weak prior towards the catalogue, which decides what no row determines."""


def _causes() -> Mapping[str, tuple[str, ...]]:
    """The causes of time that each factor scales. Other causes, such as idle stages, scale with `compute`."""
    return {
        "compute": ("compute", "update"),
        "links": (*inner_causes(), "data", "stages", "host copies"),
        "host": ("host",),
    }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors on catalogue-based forecasts; 1 if not fitted."""

    compute: float = 1.0
    links: float = 1.0
    host: float = 1.0
    memory: float = 1.0
    rows: int = 0

    def apply(self, forecast: Forecast) -> Forecast:
        """Scale a forecast to the user's machines."""
        if (self.compute, self.links, self.host, self.memory) == (1.0, 1.0, 1.0, 1.0):
            return forecast
        factors = {cause: getattr(self, name) for name, causes in _causes().items() for cause in causes}
        time = {cause: seconds * factors.get(cause, self.compute) for cause, seconds in forecast.time.items()}
        memory = {c: round(size * self.memory) if c in KEPT else size for c, size in forecast.memory.items()}
        return Forecast(memory=memory, time=time)

    def sentences(self) -> tuple[str, ...]:
        """Describe the fitted factors."""
        words = {"compute": "devices compute", "links": "links carry", "host": "hosts launch"}
        found = [
            f"{words[name]} at {1 / getattr(self, name):.0%} of the catalogue's pace"
            for name in words
            if getattr(self, name) != 1
        ]
        if self.memory != 1:
            found.append(f"activations take {self.memory:.0%} of the account")
        listed = "; ".join(found) or "nothing, because the rows determine no factor"
        return (f"Fitted to {self.rows} runs: {listed}.",)


def calibrate(outcomes: Sequence[ScoredRun]) -> Calibration:
    """Fit factors to measured runs. Rows count equally at first; outliers lose weight."""
    timed = [o for o in outcomes if o.account is not None and o.row.step is not None]
    held = [o for o in outcomes if o.account is not None and o.row.peak_gib is not None]
    found = Calibration(rows=len({o.row.name for o in (*timed, *held)}))
    if timed:
        found = replace(found, **_fit_time(timed))  # type: ignore[arg-type]  # factors only
    if held:
        found = replace(found, memory=_fit_memory(held))
    return found


def _fit_time(outcomes: Sequence[ScoredRun]) -> dict[str, float]:
    groups = list(_causes())
    shares = np.array([_shares(outcome) for outcome in outcomes])
    fitted = [index for index in range(len(groups)) if shares[:, index].mean() >= LEAST]
    if not fitted:
        return {}
    fixed = shares[:, [i for i in range(len(groups)) if i not in fitted]].sum(axis=1)
    factors = _robust(shares[:, fitted], 1 - fixed)
    return {groups[place]: float(factor) for place, factor in zip(fitted, factors, strict=True)}


def _shares(outcome: ScoredRun) -> list[float]:
    """Forecast seconds of each group as shares of the measured step; for an exact forecast they add up to 1."""
    assert outcome.account is not None
    assert outcome.row.step is not None
    parts = outcome.account.timing.parts
    groups = _causes()
    known = {cause for causes in groups.values() for cause in causes}
    sums = {name: sum(parts.get(cause, 0.0) for cause in causes) for name, causes in groups.items()}
    sums["compute"] += sum(seconds for cause, seconds in parts.items() if cause not in known)
    return [seconds / outcome.row.step for seconds in sums.values()]


def _fit_memory(outcomes: Sequence[ScoredRun]) -> float:
    rows = []
    for outcome in outcomes:
        assert outcome.account is not None
        assert outcome.row.peak_gib is not None
        memory, measured = outcome.account.ranks[0].memory, outcome.row.peak_gib * 2**30
        kept = sum(memory.get(cause, 0) for cause in KEPT)
        rows.append((kept / measured, 1 - (sum(memory.values()) - kept) / measured))
    shares, wanted = np.array(rows).T
    return float(_robust(shares[:, None], wanted)[0])


def _robust(shares: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Iteratively reweighted least squares: factors for which `shares @ factors` is close to `wanted`."""
    weights = np.ones(len(wanted))
    factors = np.ones(shares.shape[1])
    for _ in range(ROUNDS):
        roots = np.sqrt(weights)
        left = np.vstack([shares * roots[:, None], PRIOR * np.eye(shares.shape[1])])
        right = np.concatenate([wanted * roots, PRIOR * np.ones(shares.shape[1])])
        factors = np.clip(np.linalg.lstsq(left, right, rcond=None)[0], *BOUNDS)
        weights = 1 / np.maximum(np.abs(shares @ factors - wanted), 0.02)
        weights /= weights.max()
    return factors
