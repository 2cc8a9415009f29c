"""Bytes by cause and seconds by cause of one step on one rank, foretold or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MEMORY_CAUSES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "communication",
    "logits",
    "temporary",
    "allocator",
)
"""What memory may be spent on, in the order in which it is shown."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast and a measurement are the same type, so a comparison is a subtraction."""

    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by cause, at the moment of the peak. The causes are those of MEMORY_CAUSES."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Seconds by cause. The causes are the caller's, as long as they add up to the step."""

    def __post_init__(self) -> None:
        unknown = [cause for cause in self.memory if cause not in MEMORY_CAUSES]
        if unknown:
            raise ValueError(f"Unknown memory cause {unknown[0]!r}; causes are {', '.join(MEMORY_CAUSES)}.")
        ordered = {cause: self.memory[cause] for cause in MEMORY_CAUSES if cause in self.memory}
        object.__setattr__(self, "memory", MappingProxyType(ordered))
        object.__setattr__(self, "time", MappingProxyType(dict(self.time)))

    @property
    def peak(self) -> int:
        """Bytes, all causes together."""
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Seconds of one step, all causes together."""
        return sum(self.time.values())

    def __sub__(self, other: Forecast) -> Forecast:
        """The difference by cause; a cause that one side does not name counts as zero there."""
        memory, time = {**self.memory, **other.memory}, {**self.time, **other.time}
        return Forecast(
            memory={cause: self.memory.get(cause, 0) - other.memory.get(cause, 0) for cause in memory},
            time={cause: self.time.get(cause, 0.0) - other.time.get(cause, 0.0) for cause in time},
        )

    def to_json(self) -> dict[str, Any]:
        return {"memory": dict(self.memory), "time": dict(self.time)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Forecast:
        return cls(memory=value["memory"], time=value["time"])

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping does not pickle, and forecasts travel between processes.
        return Forecast.from_json, (self.to_json(),)


Measurement = Forecast
