"""A ranking as one HTML file that opens anywhere: it carries all that it needs, and asks nothing of a network.

    write_page(ranking.to_json(), Path("plan.html"))

The page is `plan_page.html`, which escapes whatever it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.facts.timeline import Timeline
from meshwright.report.charts_bars import bar_plot
from meshwright.report.html import render_page, template, write_file
from meshwright.report.plan_against import in_order, place_of, verdict
from meshwright.report.plan_bars import MEMORY, memory_chart, memory_room, time_chart
from meshwright.report.plan_refusals import kinds_of_refusals
from meshwright.report.timeline import draw
from meshwright.units import show_seconds


def write_page(document: dict[str, Any], path: Path, timeline: Timeline | None = None) -> None:
    """The page of the document that `plan --json` prints."""
    write_file(page(document, timeline), path)


def page(document: dict[str, Any], timeline: Timeline | None = None) -> str:
    """The page as text, with the timeline of a pipeline if there is one."""
    return render_page("plan_page.html", has_charts=bool(document["plans"]), **_shown(document, timeline))


def body(document: dict[str, Any], timeline: Timeline | None = None) -> str:
    """What the page shows below its title, for a page that has a title and the scripts of its own."""
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
    """The first plan's figures: what, how much, and a word on it."""
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
    """A plan's own sentences, and what else its ranks hold."""
    sentences = list(plan["why"])
    if plan["stages"]:
        peaks = ", ".join(f"{stage['peak_gib']:.1f}" for stage in plan["stages"])
        sentences.append(f"Its stages hold {peaks} GiB, first to last.")
    if plan["host_gib"]:
        sentences.append(f"A node's host holds {plan['host_gib']:.1f} GiB of what is offloaded.")
    return sentences


COLUMNS = ("step", "against the first", "tokens/s/device", "samples/s", "MFU", "allocated", "reserved", "forecast")


def _rows(document: dict[str, Any]) -> list[tuple[str, bool, tuple[str, ...]]]:
    """Lines of the table: the strategy, whether it is somebody else's choice, and the cells under COLUMNS."""
    first, theirs = document["plans"][0], place_of(document)
    return [(plan["strategy"], place == theirs, _row(plan, first)) for place, plan in in_order(document)]


def _row(plan: dict[str, Any], first: dict[str, Any]) -> tuple[str, ...]:
    """A plan's line of the table, under COLUMNS."""
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
    """How far the first plan's figures may be off."""
    bars = plans[0]["error_bar"] if plans else {}
    return f"Memory within {bars['memory']:.0%}, time within {bars['time']:.0%}, three times in four." if bars else ""
