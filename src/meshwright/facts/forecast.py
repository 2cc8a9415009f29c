"""Bytes and seconds by cause of one step on one rank, forecast or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MEMORY_CAUSES = (
    *("parameters", "gradients", "optimizer", "activations", "gathered"),
    *("communication", "logits", "temporary", "allocator"),
)
"""Uses of memory, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Memory and time of one step. A measurement has the same type, so a comparison is a subtraction."""

    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the peak, by a cause from MEMORY_CAUSES."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Seconds by cause; the caller names the causes, and they add up to the step."""

    def __post_init__(self) -> None:
        unknown = [cause for cause in self.memory if cause not in MEMORY_CAUSES]
        if unknown:
            raise ValueError(f"Unknown memory cause {unknown[0]!r}; causes are {', '.join(MEMORY_CAUSES)}.")
        ordered = {cause: self.memory[cause] for cause in MEMORY_CAUSES if cause in self.memory}
        object.__setattr__(self, "memory", MappingProxyType(ordered))
        object.__setattr__(self, "time", MappingProxyType(dict(self.time)))

    @property
    def peak(self) -> int:
        """Bytes of all causes."""
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Seconds of all causes."""
        return sum(self.time.values())

    def __sub__(self, other: Forecast) -> Forecast:
        """The difference by cause; a missing cause counts as zero."""
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
        # Forecasts are sent between processes, and a read-only mapping cannot be pickled.
        return Forecast.from_json, (self.to_json(),)


Measurement = Forecast
