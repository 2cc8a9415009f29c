"""A rehearsal or a tuning as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.report.colours import MEMORY, UNKNOWN
from meshwright.report.html import render_page, write_file
from meshwright.report.rehearse import figures, headline, place_of_cause, remarks, role_cells, trial_cells, verdict
from meshwright.units import GIB, show_bytes


def rehearsal_html(document: dict[str, Any]) -> str:
    if "trials" in document:
        return render_page("tuning_page.html", has_charts=False, document=document, cells=trial_cells)
    return render_page(
        "rehearsal_page.html",
        has_charts=False,
        headline=headline(document),
        document=document,
        verdict=verdict(document),
        bars=[_bar(name, document) for name in ("measured", "forecast")],
        figures=list(figures(document)),
        roles=[role_cells(role) for role in document["roles"]],
        remarks=remarks(document),
    )


def write_rehearsal(document: dict[str, Any], path: Path) -> None:
    write_file(rehearsal_html(document), path)


def _bar(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """Memory by cause as parts of a bar whose full width is the limit, or the peak if that is larger."""
    memory = document[name]["memory"]
    most = max(document["limit_gib"], *(document[kind]["peak_gib"] or 0.0 for kind in ("measured", "forecast")))
    fullest = max([document[kind]["peak_gib"] or 0.0 for kind in ("measured", "forecast")])
    width = most if fullest > 0.2 * most else fullest  # a small model would not be seen beside a large limit
    parts = [
        {
            "cause": cause,
            "colour": MEMORY.get(cause, UNKNOWN),
            "share": 100 * size / width if width else 0.0,
            "words": f"{cause} {show_bytes(size * GIB)}",
        }
        for cause, size in sorted(memory.items(), key=lambda item: place_of_cause(item[0]))
        if size > 0
    ]
    return {"name": name, "parts": parts}
