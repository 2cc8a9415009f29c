"""Fit a link's latency and bandwidth to measured collectives, by least squares of relative errors.

Note on the model: a ring takes `launch + steps x latency + bytes / bandwidth` seconds, which is linear in the latency
and in the inverse bandwidth. Dividing every row by its seconds gives small and large messages the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from meshwright.facts.links import ring_bytes, ring_steps

RINGS = {"cuda": ("all_gather", "reduce_scatter"), "cpu": ("all_reduce", "all_gather", "reduce_scatter")}
"""Collectives that run as rings, by device: NCCL may sum in the switch or in a tree. Others are only shown."""
_LEAST = 1e-7
"""The least seconds of a hop, which noise could make negative."""


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """A link's fitted bandwidth and latency."""

    bandwidth: float
    """Bytes per second: of a device within a node, of a node between nodes."""
    latency: float
    error: float
    """Median relative error of the fit over the rows."""
    rows: int


def fit_link(
    rows: Sequence[dict[str, Any]],
    *,
    launch: float = 0.0,
    devices_per_node: int = 1,
    kinds: Sequence[str] = RINGS["cpu"],
) -> LinkFit | None:
    """Fit the rows; None without rows.

    A group between nodes has the share of a node's link that its ranks have of the node's devices.
    """
    points = [_point(row, launch, devices_per_node) for row in rows if row["kind"] in kinds]
    if not points:
        return None
    latency, inverse = _solve(points)
    error = median(abs(steps * latency + size * inverse - seconds) / seconds for steps, size, seconds in points)
    return LinkFit(bandwidth=1 / inverse, latency=latency, error=error, rows=len(points))


_Point = tuple[float, float, float]
"""Steps, bytes and seconds of a ring."""


def _point(row: dict[str, Any], launch: float, devices_per_node: int) -> _Point:
    share = min(1.0, row["per_node"] / devices_per_node) if row["nodes"] > 1 else 1.0
    size = ring_bytes(row["kind"], row["bytes"], row["ranks"]) / share
    return ring_steps(row["kind"], row["ranks"]), size, max(row["seconds"] - launch, _LEAST)


def _solve(points: Sequence[_Point]) -> tuple[float, float]:
    """Latency and seconds per byte, both positive."""
    rows = [(steps / seconds, size / seconds) for steps, size, seconds in points]
    aa, ab, bb = sum(x * x for x, _ in rows), sum(x * y for x, y in rows), sum(y * y for _, y in rows)
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant else 0.0
    inverse = (b * aa - a * ab) / determinant if determinant else 0.0
    if inverse <= 0:  # latency hides the bandwidth: the largest message shows it best
        inverse = min(seconds / size for _, size, seconds in points)
    return max(latency, _LEAST), inverse
