"""A ranking as one self-contained HTML file that needs no network.

        write_page(ranking.to_json(), Path("plan.html"))

The template `plan_page.html` escapes all input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.facts.timeline import Timeline
from meshwright.report.charts_bars import bar_plot
from meshwright.report.html import render_page, template, write_file
from meshwright.report.plan_bars import MEMORY, memory_chart, memory_room, time_chart
from meshwright.report.plan_foreign import in_order, place_of, verdict
from meshwright.report.plan_refusals import kinds_of_refusals
from meshwright.report.timeline import draw
from meshwright.units import show_seconds


def write_page(document: dict[str, Any], path: Path, timeline: Timeline | None = None) -> None:
    """Write the page of the document that `plan --json` prints."""
    write_file(page(document, timeline), path)


def page(document: dict[str, Any], timeline: Timeline | None = None) -> str:
    """The page as text, with the timeline of a pipeline if there is one."""
    return render_page("plan_page.html", has_charts=bool(document["plans"]), **_shown(document, timeline))


def body(document: dict[str, Any], timeline: Timeline | None = None) -> str:
    """The content below the title, for a page that brings its own title and scripts."""
    return template("plan_body.html").render(_shown(document, timeline))


def _shown(document: dict[str, Any], timeline: Timeline | None) -> dict[str, Any]:
    plans = document["plans"]
    charts = (memory_chart(document), time_chart(document)) if plans else ()
    return {
        "document": document,
        "answer": _answer(document) if plans else (),
        "reasons": [_reasons(plan) for plan in plans],
        "charts": [(chart, bar_plot(chart)) for chart in charts],
        "columns": COLUMNS,
        "rows": _rows(document) if plans else (),
        "timeline": draw(timeline) if timeline else None,
        "against": document.get("against"),
        "verdict": verdict(document["against"]) if document.get("against") else "",
        "accuracy": _accuracy(plans),
        "kinds": kinds_of_refusals(document["refused"]),
    }


def _answer(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The first plan's figures: label, amount and remark."""
    plan = document["plans"][0]
    room = memory_room(document["cluster"])
    held = f"of {room:,.1f} GiB on each device" if room else "on the fullest rank"
    figures = [
        ("step", show_seconds(plan["step_ms"] / 1e3), f"{plan['samples_per_s']:,.1f} samples/s"),
        ("memory", MEMORY.total(plan["reserved_gib"]), held),
    ]
    if plan["tokens_per_s_per_device"]:
        figures.append(("speed", f"{plan['tokens_per_s_per_device']:,.0f}", "tokens/s on each device"))
    figures.append(("utilisation", f"{plan['mfu']:.1%}", "of the devices' peak (MFU)"))
    return figures


def _reasons(plan: dict[str, Any]) -> list[str]:
    """A plan's explanation, and the memory of its stages and hosts."""
    sentences = list(plan["why"])
    if plan["stages"]:
        peaks = ", ".join(f"{stage['peak_gib']:.1f}" for stage in plan["stages"])
        sentences.append(f"Its stages use {peaks} GiB, first to last.")
    if plan["host_gib"]:
        sentences.append(f"Each node's host holds {plan['host_gib']:.1f} GiB of offloaded state.")
    return sentences


COLUMNS = ("step", "vs. first", "tokens/s/device", "samples/s", "MFU", "allocated", "reserved", "forecast")


def _rows(document: dict[str, Any]) -> list[tuple[str, bool, tuple[str, ...]]]:
    """Table rows: the strategy, whether it is the user's own config, and the cells for COLUMNS."""
    first, theirs = document["plans"][0], place_of(document)
    return [(plan["strategy"], place == theirs, _row(plan, first)) for place, plan in in_order(document)]


def _row(plan: dict[str, Any], first: dict[str, Any]) -> tuple[str, ...]:
    """A plan's cells, for COLUMNS."""
    tokens = plan["tokens_per_s_per_device"]
    return (
        show_seconds(plan["step_ms"] / 1e3),
        "" if plan is first else f"{plan['step_ms'] / first['step_ms'] - 1:+.1%}",
        f"{tokens:,.0f}" if tokens else "-",
        f"{plan['samples_per_s']:,.2f}",
        f"{plan['mfu']:.1%}",
        f"{plan['peak_gib']:,.2f} GiB",
        f"{plan['reserved_gib']:,.2f} GiB",
        "traced" if plan["grade"] == "trace" else "closed form",
    )


def _accuracy(plans: Sequence[Mapping[str, Any]]) -> str:
    """The error bar of the first plan's figures."""
    bars = plans[0]["error_bar"] if plans else {}
    return f"Memory within {bars['memory']:.0%}, time within {bars['time']:.0%}, in 3 of 4 cases." if bars else ""
