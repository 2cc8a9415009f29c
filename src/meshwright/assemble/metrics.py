"""Metrics of an evaluation: this rank's sums, and their totals over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.assemble.batch import MicroBatch
from meshwright.assemble.precision import raise_small
from meshwright.assemble.world import World
from meshwright.errors import JobError, one_line
from meshwright.facts.evaluation import Metric


class MetricSums:
    """Sums over the samples that this rank counts.

    A metric that raises is noted and reported by `results`, where all ranks meet: raising at once would leave other
    ranks of a pipeline waiting.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._sums: dict[str, torch.Tensor] = {}
        self._problem: str | None = None

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def add(self, output: Any, piece: MicroBatch, *, counts: bool) -> None:
        """Read a micro-batch's output, and count it unless it is a stand-in or another rank counts the same samples.

        All ranks read all outputs: reading one may be collective, where `loss=pieced` makes logits when they are read.
        """
        if self._problem is not None:
            return
        output = raise_small(output)
        for name, metric in self._metrics.items():
            try:
                found = torch.as_tensor(metric.sums(output, piece.data)).detach().to("cpu", torch.float64).reshape(-1)
                if counts and piece.span.length:
                    self._sums[name] = found + self._sums[name] if name in self._sums else found
            except Exception as error:  # whatever a user's function raises
                self._problem = f"The metric {name!r} raised {one_line(error)}"
                return

    def results(self, world: World) -> dict[str, float]:
        """The metrics over all ranks, equal on all of them. All ranks must call it; all raise if a metric failed."""
        if not self._metrics:
            return {}
        own = {name: found.tolist() for name, found in self._sums.items()}
        everyone = world.gather((self._problem, own))
        if problems := [problem for problem, _ in everyone if problem]:
            raise JobError(problems[0])
        totals = {n: _added(n, [sums[n] for _, sums in everyone if n in sums]) for n in self._metrics}
        return {name: _result(name, metric, totals[name]) for name, metric in self._metrics.items()}


def _added(name: str, parts: list[list[float]]) -> list[float]:
    if not parts or len({len(part) for part in parts}) > 1:
        raise JobError(f"The metric {name!r} must return as many numbers for every batch.")
    return [sum(column) for column in zip(*parts, strict=True)]


def _result(name: str, metric: Metric, totals: list[float]) -> float:
    try:
        return float(metric.result(totals))
    except Exception as error:
        raise JobError(f"The metric {name!r} raised {one_line(error)}") from error
