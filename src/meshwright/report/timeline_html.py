"""Write a timeline to a file: a page for .html, trace events for .json."""

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
"""Pieces shown on a page of its own."""
ENDINGS = (".html", ".json")


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
    return render_page("timeline_page.html", has_charts=True, drawing=draw(timeline, drawn=DRAWN))
