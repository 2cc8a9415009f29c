"""The input and output of an export: request, batch as other frameworks divide it, result, and the comment on top."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ExchangeError
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


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A global batch with `micro * steps * data ranks == total`, which other frameworks require."""

    micro: int
    """Samples per rank and forward pass."""
    steps: int
    """Micro-batches per optimizer step."""
    total: int


def cut(request: ExportRequest, strategy: Strategy, *, alone: int) -> Batches:
    """Divide the request's global batch; `alone` is the micro-batch if neither strategy nor job sets one."""
    ranks = strategy.data_ranks
    if request.global_batch is None:
        micro = strategy.micro_batch or alone
        return Batches(micro=micro, steps=1, total=micro * ranks)
    samples, over = divmod(request.global_batch, ranks)
    steps = 1 if strategy.micro_batch is None else -(-samples // strategy.micro_batch)
    if over or not samples or samples % steps:
        raise ExchangeError(
            f"A global batch of {request.global_batch} cannot be divided equally over {ranks} data ranks and "
            f"{max(steps, 1)} micro-batches, as the other framework requires; choose mb=N so that N times the data "
            "ranks divides the global batch, or another batch with --batch."
        )
    return Batches(micro=samples // steps, steps=steps, total=request.global_batch)


def named(strategy: Strategy, micro: int) -> tuple[Unsupported, ...]:
    """Report a micro-batch size that the strategy leaves open or sets differently."""
    if strategy.micro_batch == micro:
        return ()
    becomes = {"micro_batch": micro}
    if strategy.micro_batch is None:
        says = f"the strategy sets none, but the file must: it says {micro}"
        return (Unsupported(term="mb", says=says, becomes=becomes),)
    says = f"a rank's samples are cut into equal parts there, of {micro} each"
    return (Unsupported(term=f"mb={strategy.micro_batch}", says=says, becomes=becomes),)


def comments(request: ExportRequest, losses: Sequence[Unsupported], remarks: Sequence[str] = ()) -> str:
    """The file's origin, remarks for its user, and the terms without an equal; each line starts with `#`."""
    nodes = f" in {request.nodes} nodes" if request.nodes > 1 else ""
    ranks = f"{request.ranks} rank{'s' * (request.ranks > 1)}"
    lines = [f"meshwright export: {request.strategy} on {ranks}{nodes}.", *remarks]
    if losses:
        lines += ["Without an equal here:", *(f"- {loss}" for loss in losses)]
    return "".join(f"# {line}\n" for text in lines for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
