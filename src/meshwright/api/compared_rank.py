"""A rehearsal of one rank beside its forecast, and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.api.rehearsal_site import RehearsalSite
from meshwright.facts.rank_forecast import RankForecast
from meshwright.facts.rehearsal import OUT_OF_MEMORY, Rehearsal
from meshwright.facts.strategy import Strategy
from meshwright.units import GIB


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A rehearsal of one rank beside its forecast."""

    strategy: Strategy
    rank: int
    site: RehearsalSite
    measured: Rehearsal
    forecast: RankForecast

    @property
    def fits(self) -> bool:
        return self.measured.ran and self.measured.held <= self.site.limit

    @property
    def step(self) -> float | None:
        """Seconds of a step: measured compute, and the forecast's communication and idle time."""
        if self.measured.seconds is None or self.forecast.waits is None:
            return self.measured.seconds
        return self.measured.seconds + self.forecast.waits

    @property
    def quickest_step(self) -> float | None:
        """Seconds of a step that nothing else on the host disturbs, as far as the timed steps show it."""
        if self.measured.quickest is None or self.forecast.waits is None:
            return self.measured.quickest
        return self.measured.quickest + self.forecast.waits

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": str(self.strategy),
            "world": self.site.world,
            "rank": self.rank,
            "device": self.measured.device,
            "status": self.measured.status,
            "reason": self.measured.reason,
            "measured": _show_measured(self),
            "forecast": _show_forecast(self.forecast),
            "error": _errors(self.measured, self.forecast),
            "fits": self.fits,
            "limit_gib": self.site.limit / GIB,
            "room_gib": (self.site.limit - self.measured.held) / GIB if self.measured.ran else None,
            "seconds": self.measured.took,
            "notes": [*self.measured.notes, *self.forecast.notes],
        }


def _show_measured(compared: Compared) -> dict[str, Any]:
    measured = compared.measured
    at = measured.peak_at
    return {
        "peak_gib": measured.peak / GIB if measured.peak else None,
        "reserved_gib": None if measured.reserved is None else measured.reserved / GIB,
        "memory": {cause: size / GIB for cause, size in measured.memory.items()},
        "peak_at": {"phase": at.phase, "module": at.module} if measured.peak else None,
        "wanted_gib": measured.wanted / GIB if measured.status == OUT_OF_MEMORY else None,
        "compute_ms": None if measured.seconds is None else measured.seconds * 1e3,
        "step_ms": None if compared.step is None else compared.step * 1e3,
        "retries": measured.retries,
    }


def _show_forecast(forecast: RankForecast) -> dict[str, Any]:
    step = None if forecast.compute is None or forecast.waits is None else forecast.compute + forecast.waits
    return {
        "peak_gib": None if forecast.peak is None else forecast.peak / GIB,
        "reserved_gib": None if forecast.reserved is None else forecast.reserved / GIB,
        "memory": {cause: size / GIB for cause, size in forecast.memory.items()},
        "compute_ms": None if forecast.compute is None else forecast.compute * 1e3,
        "waiting_ms": None if forecast.waits is None else forecast.waits * 1e3,
        "step_ms": None if step is None else step * 1e3,
        "time": {cause: seconds * 1e3 for cause, seconds in forecast.time.items()},
        "grade": forecast.grade,
    }


def _errors(measured: Rehearsal, forecast: RankForecast) -> dict[str, float | None]:
    """What was forecast, by what was measured, less one. "time" is that of the computation, which was measured."""
    pairs = {
        "memory": (forecast.peak, measured.peak),
        "reserved": (forecast.reserved, measured.reserved),
        "time": (forecast.compute, measured.seconds),
    }
    return {name: told / seen - 1 if measured.ran and told and seen else None for name, (told, seen) in pairs.items()}
