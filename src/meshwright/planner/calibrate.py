"""A few efficiencies of one's own machines, fitted to runs that were measured on them.

The account says what a run computes, sends and keeps; how fast one's own devices and links really do it may differ from
the catalogue by a factor. Three factors for time and one for memory are fitted, each only where rows tell of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.facts.forecast import Forecast
from meshwright.planner.scores import ScoredRun
from meshwright.planner.step_layout import inner_causes

KEPT = ("activations", "logits", "temporary", "gathered", "allocator")
"""What a factor on memory goes with: states are counted, not estimated."""
LEAST = 0.02
"""The mean share of a step that a cause needs, for rows to tell anything of it."""
BOUNDS = (0.2, 5.0)
ROUNDS = 25
PULL = 0.02


def _causes() -> Mapping[str, tuple[str, ...]]:
    """Which causes of time one factor goes with. Idle stages wait for the others' work, so they go with `compute`."""
    return {
        "compute": ("compute", "update"),
        "links": (*inner_causes(), "data", "stages", "host copies"),
        "host": ("host",),
    }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors on what the catalogue gives; 1 where nothing was fitted."""

    compute: float = 1.0
    links: float = 1.0
    host: float = 1.0
    memory: float = 1.0
    rows: int = 0

    def apply(self, forecast: Forecast) -> Forecast:
        """A forecast as these machines would have it."""
        if (self.compute, self.links, self.host, self.memory) == (1.0, 1.0, 1.0, 1.0):
            return forecast
        factors = {cause: getattr(self, name) for name, causes in _causes().items() for cause in causes}
        time = {cause: seconds * factors.get(cause, self.compute) for cause, seconds in forecast.time.items()}
        memory = {c: round(size * self.memory) if c in KEPT else size for c, size in forecast.memory.items()}
        return Forecast(memory=memory, time=time)

    def sentences(self) -> tuple[str, ...]:
        """What was fitted, in words."""
        words = {
            "compute": "devices compute",
            "links": "links carry",
            "host": "hosts launch",
        }
        found = [
            f"{words[name]} at {1 / getattr(self, name):.0%} of the catalogue's pace"
            for name in words
            if getattr(self, name) != 1
        ]
        if self.memory != 1:
            found.append(f"activations take {self.memory:.0%} of the account")
        listed = "; ".join(found) or "nothing: the rows tell no factor"
        return (f"Fitted to {self.rows} runs: {listed}.",)


def calibrate(outcomes: Sequence[ScoredRun]) -> Calibration:
    """Fit factors to measured runs, each row counting alike and those far off less."""
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
    told = [index for index in range(len(groups)) if shares[:, index].mean() >= LEAST]
    if not told:
        return {}
    fixed = shares[:, [i for i in range(len(groups)) if i not in told]].sum(axis=1)
    factors = _robust(shares[:, told], 1 - fixed)
    return {groups[place]: float(factor) for place, factor in zip(told, factors, strict=True)}


def _shares(outcome: ScoredRun) -> list[float]:
    """Forecast seconds of each group as shares of the measured step; they add up to 1 where a forecast is right."""
    assert outcome.account is not None
    assert outcome.row.step is not None
    parts = outcome.account.timing.parts
    groups = _causes()
    known = {cause for causes in groups.values() for cause in causes}
    rest = sum(seconds for cause, seconds in parts.items() if cause not in known)
    sums = {name: sum(parts.get(cause, 0.0) for cause in causes) for name, causes in groups.items()}
    sums["compute"] += rest
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
    """Factors with which shares add up to what is wanted; rows that stay far off weigh less with each round."""
    weights = np.ones(len(wanted))
    factors = np.ones(shares.shape[1])
    for _ in range(ROUNDS):
        roots = np.sqrt(weights)
        # A weak pull towards the catalogue decides what no row tells.
        left = np.vstack([shares * roots[:, None], PULL * np.eye(shares.shape[1])])
        right = np.concatenate([wanted * roots, PULL * np.ones(shares.shape[1])])
        factors = np.clip(np.linalg.lstsq(left, right, rcond=None)[0], *BOUNDS)
        weights = 1 / np.maximum(np.abs(shares @ factors - wanted), 0.02)
        weights /= weights.max()
    return factors
