"""A ranking as one self-contained HTML file that needs no network.

        write_page(ranking.to_json(), Path("plan.html"))

The template `plan_page.html` escapes all input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.timeline import Timeline
from meshwright.planner.account import usable
from meshwright.report import colours
from meshwright.report.bars import TIME, Chart, Lane, Quantity
from meshwright.report.charts_bars import bar_plot
from meshwright.report.html import render_page, template, write_file
from meshwright.report.plan import in_order, place_of, verdict
from meshwright.report.timeline import draw
from meshwright.units import gib, show_seconds

COLUMNS = ("step", "vs. first", "tokens/s/device", "samples/s", "MFU", "allocated", "reserved", "forecast")
SHOWN = 100
"""Candidates of one kind that a page lists; more would add nothing."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NEED = re.compile(r"needs (\d+(?:\.\d+)?)")
MEMORY = Quantity(
    key="memory",
    unit="GiB",
    colours=colours.MEMORY,
    total=lambda size: f"{size:,.1f} GiB",
    exact=lambda size: f"{size:,.3f} GiB",
)


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
    if not bars:
        return ""
    within = f"Memory within {bars['memory']:.0%}, time within {bars['time']:.0%}, in 3 of 4 cases."
    return " ".join([within, *plans[0].get("untested", ())])


@dataclass(frozen=True, kw_only=True)
class RefusalKind:
    """Candidates refused for the same reason."""

    title: str
    count: int
    shown: tuple[tuple[str, str], ...]
    """Strategies with their individual reasons."""

    @property
    def hidden(self) -> int:
        return self.count - len(self.shown)


def kinds_of_refusals(refused: Sequence[dict[str, str]]) -> list[RefusalKind]:
    """The most common kind first; within "too large", the smallest excess first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for refusal in refused:
        groups.setdefault(_pattern(refusal["reason"]), []).append((refusal["strategy"], refusal["reason"]))
    kinds = [_kind(pattern, found) for pattern, found in groups.items()]
    return sorted(kinds, key=lambda kind: -kind.count)


def _pattern(reason: str) -> str:
    """Reasons that differ only in numbers share a pattern; so do all that lack memory."""
    return "Too large" if _NEED.match(reason) else _NUMBER.sub("…", reason)


def _kind(pattern: str, found: list[tuple[str, str]]) -> RefusalKind:
    reasons = {reason for _, reason in found}
    title = pattern if len(reasons) > 1 else reasons.pop()
    nearest = sorted(found, key=lambda entry: float(need[1]) if (need := _NEED.match(entry[1])) else 0.0)
    return RefusalKind(title=title[:1].upper() + title[1:], count=len(found), shown=tuple(nearest[:SHOWN]))


def memory_chart(document: dict[str, Any]) -> Chart:
    """Reserved memory of each plan's fullest rank, and the device's limit if it is known."""
    room = memory_room(document["cluster"])
    known = f"The dashed line is the device memory available to tensors: {room:,.1f} GiB." if room else ""
    note = f"At the peak of a step, on the fullest rank. {known}".strip()
    return MEMORY.chart(note, _lanes(MEMORY, document["plans"]), limit=room)


def time_chart(document: dict[str, Any]) -> Chart:
    """One step of each plan."""
    note = "One optimizer step over the global batch; communication overlapped with compute is not counted."
    return TIME.chart(note, _lanes(TIME, document["plans"]))


def memory_room(cluster: str) -> float | None:
    """GiB per device available to tensors; None if the cluster's text does not say."""
    try:
        parsed = Cluster.parse(cluster)
        # CPU ranks share a machine, and its memory is known only there.
        return None if parsed.device == "cpu" else gib(usable(hardware_of(parsed)))
    except MeshwrightError:
        return None


def _lanes(quantity: Quantity, plans: list[dict[str, Any]]) -> list[Lane]:
    bars = [quantity.bar(plan[quantity.key], float(sum(plan[quantity.key].values()))) for plan in plans]
    return [
        Lane(strategy=plan["strategy"], total=bar.total, bars={"": bar}) for plan, bar in zip(plans, bars, strict=True)
    ]
