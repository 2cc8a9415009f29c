"""Drawings of each strategy's mesh: one cell per rank, its position, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankCell:
    rank: int
    column: int
    row: int
    """Position in the drawing, from 1: stages side by side, ranks of a stage below each other."""
    stages: str
    fill: float
    """Parameters as a percentage of the fullest rank of the comparison."""
    parameters: str
    place: str
    """The rank and its coordinate on each axis."""
    amounts: tuple[str, ...]
    """The exact figures, by cause."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    strategy: str
    axes: str
    columns: int
    cells: tuple[RankCell, ...]

    @property
    def words(self) -> str:
        """Description of the drawing for screen readers."""
        held = "; ".join(f"{cell.place}: {', '.join(cell.amounts)}" for cell in self.cells)
        return f"{self.strategy}, {self.axes}. {held}"


def draw_meshes(rows: Sequence[dict[str, Any]]) -> tuple[Mesh, ...]:
    """A drawing for every strategy that ran."""
    measured = [row for row in rows if row["ranks"]]
    most = max((rank["memory"]["parameters"] for row in measured for rank in row["ranks"]), default=0.0) or 1.0
    return tuple(_mesh(row, most) for row in measured)


def _mesh(row: dict[str, Any], most: float) -> Mesh:
    sizes = row["ranks"][0]["sizes"]
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    across, _ = _directions(sizes)
    return Mesh(
        strategy=row["strategy"],
        axes=" x ".join(named) or "one process",
        columns=prod(sizes[name] for name in across),
        cells=tuple(_cell(number, rank, most) for number, rank in enumerate(row["ranks"])),
    )


def _directions(sizes: dict[str, int]) -> tuple[list[str], list[str]]:
    """The axes from left to right and those from top to bottom: stages across, else the data axis."""
    names = list(sizes)
    data = names.index("data")
    cut = data if prod(sizes[name] for name in names[:data]) > 1 else data + 1
    return names[:cut], names[cut:]


def _place(rank: dict[str, Any], names: list[str]) -> int:
    """A rank's place on several axes taken as one, from 1."""
    place = 0
    for name in names:
        place = place * rank["sizes"][name] + rank[name]
    return 1 + place


def _cell(number: int, rank: dict[str, Any], most: float) -> RankCell:
    sizes, held = rank["sizes"], rank["memory"]
    across, down = _directions(sizes)
    stages = ", ".join(str(stage) for stage in rank["stages"])
    place = ", ".join(f"{name} {rank[name]}" for name, size in sizes.items() if size > 1)
    return RankCell(
        rank=number,
        column=_place(rank, across),
        row=_place(rank, down),
        stages=f"stage{'s' * (len(rank['stages']) > 1)} {stages}" if stages else "",
        fill=100 * held["parameters"] / most,
        parameters=f"{held['parameters']:,.2f} MiB",
        place=f"rank {number}{f' ({place})' if place else ''}",
        amounts=tuple(f"{cause} {size:,.3f} MiB" for cause, size in held.items()),
    )
