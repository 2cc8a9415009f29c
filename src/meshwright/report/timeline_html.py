"""A timeline as a file: a page where its name ends in .html, trace events where it ends in .json."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.errors import BadInput
from meshwright.facts.timeline import Timeline
from meshwright.report.charts import check_plotly
from meshwright.report.html import render_page, write_file
from meshwright.report.timeline import draw
from meshwright.report.timeline_trace import trace_document

DRAWN = 4000
"""Pieces that a page of nothing else shows."""
ENDINGS = (".html", ".json")


def check_ending(path: Path) -> None:
    """That it is one of those, and that a page can be drawn: said before anything is planned."""
    if path.suffix not in ENDINGS:
        raise BadInput(
            f"--timeline {str(path)!r} names no kind of file that there is: end it in .html for a page, "
            "or in .json for trace events, which Perfetto opens."
        )
    if path.suffix == ".html":
        check_plotly(f"--timeline {str(path)!r}")


def write_timeline(timeline: Timeline, path: Path) -> None:
    """The file of a timeline."""
    check_ending(path)
    text = timeline_page(timeline) if path.suffix == ".html" else json.dumps(trace_document(timeline))
    write_file(text, path, what="timeline")


def timeline_page(timeline: Timeline) -> str:
    return render_page("timeline_page.html", has_charts=True, drawing=draw(timeline, drawn=DRAWN))
