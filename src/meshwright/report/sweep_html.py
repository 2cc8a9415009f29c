"""A sweep as one self-contained HTML file that needs no network; `sweep_page.html` escapes all input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.report.charts_sweep import sweep_charts
from meshwright.report.html import render_page, write_file
from meshwright.report.sweep import Document, crossing_sentences, speed_of, speed_unit, value_of
from meshwright.units import show_seconds

COLUMNS = ("kind", "step", "in total", "per device", "reserved", "MFU")


def write_page(document: Document, path: Path) -> None:
    """Write the page of the document that `plan --sweep --json` prints."""
    write_file(page(document), path)


def page(document: Document) -> str:
    has_plans = any(point["kinds"] for point in document["points"])
    return render_page(
        "sweep_page.html",
        has_charts=has_plans,
        document=document,
        sentences=crossing_sentences(document),
        charts=sweep_charts(document) if has_plans else (),
        unit=speed_unit(document),
        columns=COLUMNS,
        points=[(value_of(document, point["value"]), _rows(point), point) for point in document["points"]],
        values=[value_of(document, point["value"]) for point in document["points"]],
    )


def _rows(point: dict[str, Any]) -> list[tuple[str, bool, tuple[str, ...]]]:
    """Plans of one point: the strategy, whether it is the recommended one, and the cells for COLUMNS."""
    return [(plan["strategy"], plan["kind"] == point["best_kind"], _cells(plan)) for plan in point["kinds"]]


def _cells(plan: dict[str, Any]) -> tuple[str, ...]:
    return (
        plan["kind"],
        show_seconds(plan["step_ms"] / 1e3),
        f"{speed_of(plan, per_device=False):,.0f}",
        f"{speed_of(plan, per_device=True):,.1f}",
        f"{plan['reserved_gib']:,.1f} GiB",
        f"{plan['mfu']:.1%}",
    )
