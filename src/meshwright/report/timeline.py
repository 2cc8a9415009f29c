"""A timeline as a page or a file: a figure with one row per rank, and a table of each rank's time by kind of work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import BadInput
from meshwright.facts.timeline import KINDS, Piece, Timeline
from meshwright.report.charts import Plot, check_plotly
from meshwright.report.charts_timeline import left_out, timeline_plot
from meshwright.report.html import render_page, write_file
from meshwright.report.trace_events import trace_document
from meshwright.units import show_seconds

DRAWN = 600
"""Pieces that a figure shows; the repetitive middle of a longer step is left out."""
DRAWN_ALONE = 4000
"""Pieces shown on a page of its own."""
ENDINGS = (".html", ".json")


@dataclass(frozen=True, kw_only=True)
class Spent:
    """A rank's time for one kind of work, over the whole step."""

    kind: str
    count: int
    seconds: float
    share: float
    """Share of the step."""

    @property
    def cells(self) -> tuple[str, ...]:
        each = f"{1e3 * self.seconds / self.count:,.3f} ms"
        return self.kind, f"{self.count:,} times", each, f"{1e3 * self.seconds:,.2f} ms", f"{self.share:.1%}"


@dataclass(frozen=True)
class Row:
    rank: int
    spent: tuple[Spent, ...]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A timeline's figure, note and tables."""

    strategy: str
    note: str
    rows: tuple[Row, ...]
    plot: Plot


def draw(timeline: Timeline, *, drawn: int = DRAWN) -> Drawing:
    return Drawing(
        strategy=timeline.strategy,
        note=_note(timeline, left_out(timeline, drawn)),
        rows=tuple(Row(rank, tuple(_spent(timeline.of(rank), timeline.total))) for rank in range(timeline.ranks)),
        plot=timeline_plot(timeline, drawn),
    )


def _note(timeline: Timeline, missing: float) -> str:
    origin = "Simulated with the stages' forecast times" if timeline.origin == "forecast" else "As measured"
    gap = f" The middle, {show_seconds(missing)} of the same, is left out." if missing else ""
    return (
        f"{origin}: {timeline.micro_batches} micro-batches on {timeline.ranks} ranks under {timeline.schedule}, "
        f"{show_seconds(timeline.total)} per step, {timeline.idle:.1%} of it idle.{gap}"
    )


def _spent(pieces: tuple[Piece, ...], total: float) -> Iterator[Spent]:
    for kind in KINDS:
        found = [piece.seconds for piece in pieces if piece.kind == kind]
        if found:
            yield Spent(kind=kind, count=len(found), seconds=sum(found), share=sum(found) / total)


def check_ending(path: Path) -> None:
    """Check the file's ending, and that a page can be drawn, before anything is planned."""
    if path.suffix not in ENDINGS:
        raise BadInput(
            f"--timeline {str(path)!r} must end in .html for a page, or in .json for Perfetto's trace events."
        )
    if path.suffix == ".html":
        check_plotly(f"--timeline {str(path)!r}")


def write_timeline(timeline: Timeline, path: Path) -> None:
    check_ending(path)
    text = timeline_page(timeline) if path.suffix == ".html" else json.dumps(trace_document(timeline))
    write_file(text, path, what="timeline")


def timeline_page(timeline: Timeline) -> str:
    return render_page("timeline_page.html", has_charts=True, drawing=draw(timeline, drawn=DRAWN_ALONE))
