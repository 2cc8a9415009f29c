"""The input and output of an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.facts.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """A strategy, and what else a config or a launch file contains."""

    strategy: Strategy
    """Resolved, so that its sizes multiply to the ranks."""
    ranks: int
    """Devices on all nodes."""
    nodes: int = 1
    device: str = "cuda"
    """cuda or cpu."""
    job: str = ""
    """The job as written on the command line, or ""."""
    global_batch: int | None = None
    """Samples per optimizer step; None without a job."""
    max_norm: float | None = None
    """Gradients are clipped to this norm. None: no clipping with a job, unknown without one."""

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """A term without an equal in the other framework."""

    term: str
    """The term in the strategy's text."""
    says: str
    """Why, what the file says instead, and what to do: a clause that follows the term and a colon."""
    becomes: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's fields that the file has instead."""

    def __str__(self) -> str:
        return f"{self.term}: {self.says}."


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported file."""

    to: str
    text: str
    request: ExportRequest
    strategy: Strategy
    """The strategy that the file expresses: the request's, with `becomes` of every unsupported term."""
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
