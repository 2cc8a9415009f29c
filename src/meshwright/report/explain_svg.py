"""Pictures of a step, as SVG in the page's colours: who holds what, a rank's memory and work, a pipeline's timeline."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import Any

from markupsafe import Markup

from meshwright.facts.timeline import IDLE, SEND
from meshwright.report.colours import MEMORY, UNKNOWN, WORK, variable
from meshwright.report.explain import message_words, place_name
from meshwright.units import show_bytes, show_seconds

LABEL, CELL, ROW, GAP = 150, 58, 22, 6
"""Pixels of the names at the left, of a rank's column, of a unit's row, and between cells."""
COLUMN, MEMORY_HEIGHT, LANE = 18, 170, 40
"""Pixels of a visit's column, of the memory panel, and of a lane below it."""
NAMES = 130
"""Pixels for the names of modules below a walk."""
PHASE_WIDTH = 70
"""Pixels that the name of a phase takes."""
DRAWN = 120
"""The most visits that a picture shows."""
WIDE = 1080
"""Pixels of a timeline's width."""


def svg(width: float, height: float, words: str, parts: Iterator[str]) -> Markup:
    """A picture that scales down to the page, with `words` for readers who do not see it."""
    body = "".join(parts)
    return Markup(
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(words)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, colour: str, title: str = "", line: bool = False) -> str:
    outline = f";stroke:{variable('line')}" if line else ""
    hint = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}" '
        f'style="fill:{variable(colour)}{outline}">{hint}</rect>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, turn: int = 0) -> str:
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned} '
        f'style="fill:{variable("text")};font:{size}px system-ui,sans-serif">{escape(words)}</text>'
    )


def holds_picture(shares: dict[str, Any]) -> Markup:
    """A column for each rank and a row for each module; the coloured part is what the rank holds of it."""
    rows = list(_joined_units(shares))
    ranks = len(shares["held"])
    width, height = LABEL + ranks * (CELL + GAP), ROW * (len(rows) + 1) + GAP
    words = f"The parameters that each of {ranks} ranks holds under {shares['strategy']}"

    def parts() -> Iterator[str]:
        for rank in range(ranks):
            yield text(LABEL + rank * (CELL + GAP) + CELL / 2, ROW - 8, f"rank {rank}", anchor="middle")
        for row, (name, size, held) in enumerate(rows, 1):
            yield text(0, row * ROW + 15, _short(name))
            for rank, part in enumerate(held):
                yield from _cell(LABEL + rank * (CELL + GAP), row * ROW, part, f"rank {rank}, {name}", size)

    return svg(width, height, words, parts())


def _cell(x: float, y: float, part: dict[str, float] | None, name: str, size: int) -> Iterator[str]:
    held = 0.0 if part is None else part["bytes"]
    title = f"{name}: {show_bytes(held)} of {show_bytes(size)}"
    yield rect(x, y, CELL, ROW - GAP, "track", title, line=True)
    if part is not None:
        yield rect(x + CELL * part["start"], y, CELL * (part["end"] - part["start"]), ROW - GAP, "blue", title)


def _joined_units(shares: dict[str, Any]) -> Iterator[tuple[str, int, list[dict[str, float] | None]]]:
    """Name, bytes and parts of each unit; neighbours of one size that lie alike on all ranks are one row."""
    columns = [
        (unit["name"], unit["bytes"], [row[index] for row in shares["held"]])
        for index, unit in enumerate(shares["units"])
    ]
    for _, group in groupby(columns, key=lambda one: (one[1], repr(one[2]), one[0].rpartition(".")[0])):
        alike = list(group)
        first, last = alike[0], alike[-1]
        yield (first[0] if len(alike) == 1 else f"{first[0]} to {last[0].rpartition('.')[2]}"), first[1], first[2]


def walk_picture(walk: dict[str, Any]) -> Markup:
    """A column for each visit: memory by cause above, computing and messages below."""
    visits = walk["visits"][:DRAWN]
    width, height = LABEL + COLUMN * len(visits) + 8, MEMORY_HEIGHT + 2 * LANE + NAMES + 24
    peak = max((sum(visit["held"].values()) for visit in visits), default=1) or 1
    slowest = max((max(visit["compute_ms"], _sent(visit)) for visit in visits), default=1.0) or 1.0

    def parts() -> Iterator[str]:
        yield text(0, 14, f"memory, up to {show_bytes(peak)}")
        yield text(0, MEMORY_HEIGHT + LANE, "computes")
        yield text(0, MEMORY_HEIGHT + 2 * LANE, "sends")
        yield text(0, MEMORY_HEIGHT + 2 * LANE + 16, f"full height: {show_seconds(slowest / 1e3)}", size=10)
        for index, visit in enumerate(visits):
            yield from _column(LABEL + index * COLUMN, visit, peak, slowest)
        yield from _labels(visits)

    return svg(width, height, f"Memory and work of rank {walk['rank']} through one step", parts())


def _column(x: float, visit: dict[str, Any], peak: int, slowest: float) -> Iterator[str]:
    """A visit's boxes, with everything about it as their tooltip."""
    yield f"<g><title>{escape(_tooltip(visit))}</title>"
    y = float(MEMORY_HEIGHT)
    for cause in (*MEMORY, *(cause for cause in visit["held"] if cause not in MEMORY)):
        tall = MEMORY_HEIGHT * visit["held"].get(cause, 0) / peak * 0.96
        if tall >= 0.05:
            y -= tall
            yield rect(x, y, COLUMN - 1, tall, MEMORY.get(cause, UNKNOWN))
    base = MEMORY_HEIGHT + LANE + 4
    for lane, (ms, colour) in enumerate([(visit["compute_ms"], "blue"), (_sent(visit), "red")]):
        tall = (LANE - 8) * ms / slowest
        if tall >= 0.05:
            yield rect(x, base + lane * LANE - tall, COLUMN - 1, tall, colour)
    yield "</g>"


def _tooltip(visit: dict[str, Any]) -> str:
    lines = [f"{visit['phase']} of {place_name(visit['module'])}, micro-batch {visit['micro_batch']}"]
    lines.append(f"computes {show_seconds(visit['compute_ms'] / 1e3)}")
    lines += map(message_words, visit["messages"])
    lines += [f"{cause}: {show_bytes(size)}" for cause, size in visit["held"].items()]
    return "\n".join(lines)


def _sent(visit: dict[str, Any]) -> float:
    return float(sum(message["ms"] for message in visit["messages"]))


def _labels(visits: list[dict[str, Any]]) -> Iterator[str]:
    """Names below the columns, and the phases above them."""
    for index, visit in enumerate(visits):
        x = LABEL + index * COLUMN + COLUMN - 5
        name = _short(place_name(visit["module"]))
        yield text(x, MEMORY_HEIGHT + 2 * LANE + 14, name, anchor="end", size=10, turn=-60)
    index = 0
    for phase, group in groupby(visits, key=lambda visit: visit["phase"]):
        count = len(list(group))
        x = LABEL + index * COLUMN
        yield rect(x, MEMORY_HEIGHT + 2 * LANE + NAMES + 4, count * COLUMN - 3, 2, "quiet")
        if count * COLUMN >= PHASE_WIDTH:
            yield text(x + 2, MEMORY_HEIGHT + 2 * LANE + NAMES + 18, phase, size=11)
        index += count


def timeline_picture(timeline: dict[str, Any]) -> Markup:
    """A row for each rank of the pipeline; a box for each pass, with its micro-batch."""
    total, ranks = timeline["total"] or 1.0, timeline["ranks"]
    scale = (WIDE - 70) / total

    def parts() -> Iterator[str]:
        for rank in range(ranks):
            yield text(0, rank * 34 + 22, f"rank {rank}")
        for piece in timeline["pieces"]:
            if piece["kind"] not in (IDLE, SEND):
                yield from _box(piece, scale)

    return svg(WIDE, ranks * 34 + 8, f"The pipeline's step of {show_seconds(total)} on {ranks} ranks", parts())


def _box(piece: dict[str, Any], scale: float) -> Iterator[str]:
    x, width = 60 + piece["start"] * scale, (piece["end"] - piece["start"]) * scale
    number = piece.get("micro_batch")
    title = f"{piece['kind']}{'' if number is None else f' of micro-batch {number}'}, "
    title += show_seconds(piece["end"] - piece["start"])
    yield rect(x, piece["rank"] * 34 + 4, width - 0.5, 26, WORK[piece["kind"]], title)
    if number is not None and width > 12:
        yield text(x + width / 2, piece["rank"] * 34 + 21, str(number), anchor="middle", size=11)


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"
