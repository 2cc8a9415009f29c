"""A strategy with its forecast and the reasons for it: where the planner and the runtime meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.facts.forecast import Forecast
from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One candidate that the planner has thought through."""

    strategy: Strategy
    """How the job would lie over the cluster."""
    forecast: Forecast
    """What one step would take on the fullest rank."""
    fits: bool
    """Whether the peak stays within the device's memory."""
    why: tuple[str, ...] = ()
    """Sentences for the user: why it won, lost, or does not fit."""

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.to_json(),
            "forecast": self.forecast.to_json(),
            "fits": self.fits,
            "why": list(self.why),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        return cls(
            strategy=Strategy.from_json(value["strategy"]),
            forecast=Forecast.from_json(value["forecast"]),
            fits=value["fits"],
            why=tuple(value["why"]),
        )
