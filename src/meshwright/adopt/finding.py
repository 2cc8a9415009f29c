"""A mistake, or something to know, at a line of a script."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MISTAKE, ADVICE = "mistake", "advice"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a script does at a line, why that is wrong, and what to do."""

    name: str
    """A short name, such as "sampler-set-epoch"."""
    line: int
    message: str
    grade: str = MISTAKE
    """"mistake" changes the training or hangs; "advice" costs speed, or may surprise."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
