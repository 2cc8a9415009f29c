"""The forecast of one rank that a rehearsal is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """Memory and time of one rank's step. What cannot be forecast is None, and a note says why."""

    peak: int | None = None
    """Bytes allocated."""
    reserved: int | None = None
    """Bytes that a GPU's caching allocator would hold."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by cause at the peak."""
    grade: str = "trace"
    """How memory was forecast: "trace" by a step on fake tensors, "account" in closed form."""
    compute: float | None = None
    """Seconds that the rank computes in one step on the device at hand."""
    waits: float | None = None
    """Seconds of a step besides: exposed communication, and idle time in a pipeline."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the whole step by cause, on the cluster."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankForecast:
        return cls(**{**value, "notes": tuple(value["notes"])})
