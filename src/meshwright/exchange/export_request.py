"""What is exported, what is lost by it, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """A strategy, and what else a config or a launch file has to say."""

    strategy: Strategy
    """Resolved: its sizes multiply to the ranks."""
    ranks: int
    """Devices in all nodes together."""
    nodes: int = 1
    device: str = "cuda"
    """cuda or cpu."""
    job: str = ""
    """The job as the command line names it; "" where none was named."""
    global_batch: int | None = None
    """Samples of one optimizer step; None where no job was named."""
    max_norm: float | None = None
    """What gradients are clipped to; None: not at all, where there is a global batch, and else not known."""

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """A term that has no equal in somebody else's file."""

    term: str
    """As the strategy's text has it."""
    says: str
    """Why, what the file says instead, and what to do. A clause: the term stands before it, with a colon."""
    becomes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the strategy as the file has them."""

    def __str__(self) -> str:
        return f"{self.term}: {self.says}."


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Somebody else's file."""

    to: str
    text: str
    request: ExportRequest
    strategy: Strategy
    """What the file says, in our words: the subject's strategy with every loss applied."""
    without_equal: tuple[Unsupported, ...]

    def to_json(self) -> dict[str, Any]:
        """The document that `export --json` prints."""
        return {
            "to": self.to,
            "strategy": str(self.request.strategy),
            "becomes": str(self.strategy),
            "ranks": self.request.ranks,
            "nodes": self.request.nodes,
            "without_equal": [str(loss) for loss in self.without_equal],
            "text": self.text,
        }
