"""Loss curves of a comparison laid over each other, with every point settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 800.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 12.0, 30.0
COLOURS = ("blue", "orange", "green", "pink", "sky", "red", "violet", "yellow")
DASHES = ("", "9 4", "2 4", "12 4 2 4")
"""Curves that lie on each other are told apart by colour and dashes; the next dash once all colours are used."""


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    strategy: str
    colour: str
    dash: str
    points: tuple[Point, ...]
    words: str

    @property
    def line(self) -> str:
        """As an SVG polyline takes it."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A place on an axis."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Curves:
    curves: tuple[Curve, ...]
    steps: tuple[Mark, ...]
    losses: tuple[Mark, ...]
    checked: float | None
    """Where the steps end whose losses were held against one process."""
    width: float = WIDTH
    height: float = HEIGHT


def loss_curves(rows: Sequence[dict[str, Any]], *, checked: int) -> Curves | None:
    """All rows' losses on one scale; None where there are none."""
    known = [loss for row in rows for loss in row["losses"] if loss is not None]
    longest = max((len(row["losses"]) for row in rows), default=0)
    if not known or longest < 2:
        return None
    low, high = min(known), max(known)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    scale = _Scale(steps=longest, low=low - room, high=high + room)
    return Curves(
        curves=tuple(_curve(number, row, scale) for number, row in enumerate(rows) if row["losses"]),
        steps=tuple(Mark(at=scale.x(step), label=str(step + 1)) for step in _some(longest)),
        losses=tuple(Mark(at=scale.y(value), label=f"{value:.4g}") for value in (low, (low + high) / 2, high)),
        checked=scale.x(checked - 0.5) if checked < longest else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Scale:
    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / (self.steps - 1)

    def y(self, loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - loss) / (self.high - self.low)


def _some(steps: int) -> range:
    """Not more steps than labels have room for."""
    return range(0, steps, math.ceil(steps / 16))


def _curve(number: int, row: dict[str, Any], scale: _Scale) -> Curve:
    points = tuple(
        Point(x=scale.x(step), y=scale.y(loss), words=f"{row['strategy']}, step {step + 1}: loss {loss:.6f}")
        for step, loss in enumerate(row["losses"])
        if loss is not None
    )
    losses = ", ".join("none" if loss is None else f"{loss:.6f}" for loss in row["losses"])
    return Curve(
        strategy=row["strategy"],
        colour=COLOURS[number % len(COLOURS)],
        dash=DASHES[number // len(COLOURS) % len(DASHES)],
        points=points,
        words=f"{row['strategy']}: losses {losses}",
    )
