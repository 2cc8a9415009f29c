"""What a preflight finds in a job: one property that matters under some strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import named

Level = Literal["refused", "warning", "note"]
LEVELS: tuple[Level, ...] = ("refused", "warning", "note")
"""Most serious first: the strategy does not run; training may not be what was meant; handled at some cost."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One property of a job, with its place and what to do about it."""

    kind: str
    """A word for scripts, such as `unused-parameter`."""
    level: Level
    what: str
    """One sentence with the names of modules and parameters."""
    module: str = ""
    """The module or parameter that it is about; empty for the model, the loss or the job as a whole."""
    file: str = ""
    line: int = 0
    """Where in the author's code; 0 if that is not known."""
    under: tuple[str, ...] = ()
    """The strategies under which it matters: the one that was named, or terms of those that were tried."""
    do: str = ""
    """What to change; empty if nothing needs to be."""

    @property
    def place(self) -> str:
        """`file.py:12`; empty if it is not known."""
        return f"{named(Path(self.file))}:{self.line}" if self.line else ""

    def sentence(self, *, names: bool = False) -> str:
        """One line for people; with the `names` of the strategies that it is about."""
        place = f" ({self.place})" if self.place else ""
        under = f" [{', '.join(self.under)}]" if names else ""
        return f"{self.level}: {self.what}{place}{under} {self.do}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "under": list(self.under)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        return cls(**{**document, "under": tuple(document["under"])})
