"""What a rank knew about its memory when it ran out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """A rank that ran out of memory: its limit, its use, and what it held. All sizes are bytes."""

    rank: int
    step: int
    """The step that failed, from 1; 0 while the model was laid out."""
    limit: int
    """What the process, or its GPU, may use."""
    limited_by: str
    """What sets the limit, as words: `ulimit -d`, `the GPU`."""
    used: int
    """Used when it failed."""
    base: int
    """Used before the model was made: by Python, libraries and, on a GPU, by other processes."""
    asked: int | None = None
    """Size of the allocation that failed, if the error says it."""
    held: Mapping[str, int] = field(default_factory=dict)
    """What it held by cause, and `rest`."""

    @property
    def room(self) -> int:
        """What training may use."""
        return max(0, self.limit - self.base)

    @property
    def needed(self) -> int:
        """What training needs at least."""
        return max(0, self.used - self.base) + (self.asked or 0)

    def sentences(self) -> str:
        when = f"in step {self.step}" if self.step else "while the model was laid out"
        asked = f" and asked for {show_bytes(self.asked)} more" if self.asked else ""
        held = ", ".join(f"{cause} {show_bytes(size)}" for cause, size in self.held.items() if size)
        before = f"{show_bytes(self.base)} before training" + (f", {held}" if held else "")
        return (
            f"Rank {self.rank} ran out of memory {when}: it used {show_bytes(self.used)} of {show_bytes(self.limit)} "
            f"({self.limited_by}){asked}. It held: {before}."
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "held": dict(self.held)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MemoryReport:
        return cls(**value)
