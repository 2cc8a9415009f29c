"""From measured collectives to a link's latency and bandwidth, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from meshwright.facts.links import ring_bytes, ring_steps

RINGS = {"cuda": ("all_gather", "reduce_scatter"), "cpu": ("all_reduce", "all_gather", "reduce_scatter")}
"""What runs as a ring, by device: NCCL may sum in the switch or in a tree. The others are only shown."""
_LEAST = 1e-7
"""Seconds of a hop, where noise would make it less than nothing."""


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """A link as measurements tell it."""

    bandwidth: float
    """Bytes a second: of a device within a node, of a node between nodes."""
    latency: float
    error: float
    """The median of how far the rows lie from what the two numbers say, relative."""
    rows: int


def fit_link(
    rows: Sequence[dict[str, Any]],
    *,
    launch: float = 0.0,
    devices_per_node: int = 1,
    kinds: Sequence[str] = RINGS["cpu"],
) -> LinkFit | None:
    """`launch + steps x latency + bytes / bandwidth` through the rows; None without rows.

    Rows between nodes have the part of the node's link that their ranks have of its devices.
    """
    points = [_point(row, launch, devices_per_node) for row in rows if row["kind"] in kinds]
    if not points:
        return None
    latency, inverse = _solve(points)
    error = median(abs(steps * latency + size * inverse - seconds) / seconds for steps, size, seconds in points)
    return LinkFit(bandwidth=1 / inverse, latency=latency, error=error, rows=len(points))


_Point = tuple[float, float, float]
"""Steps, bytes of the ring, seconds."""


def _point(row: dict[str, Any], launch: float, devices_per_node: int) -> _Point:
    share = min(1.0, row["per_node"] / devices_per_node) if row["nodes"] > 1 else 1.0
    size = ring_bytes(row["kind"], row["bytes"], row["ranks"]) / share
    return ring_steps(row["kind"], row["ranks"]), size, max(row["seconds"] - launch, _LEAST)


def _solve(points: Sequence[_Point]) -> tuple[float, float]:
    """Latency and seconds a byte, neither below nothing; every row weighs the same, whatever it took."""
    rows = [(steps / seconds, size / seconds) for steps, size, seconds in points]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in _products(rows))
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant else 0.0
    inverse = (b * aa - a * ab) / determinant if determinant else 0.0
    if inverse <= 0:  # latency hides the wire: the largest message says most of it
        inverse = min(seconds / size for _, size, seconds in points)
    return max(latency, _LEAST), inverse


def _products(rows: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return ([(x, x) for x, _ in rows], list(rows), [(y, y) for _, y in rows])
