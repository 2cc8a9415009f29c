"""Speed and memory over a swept quantity: one line per kind of strategy, and crossings as dotted lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, product
from math import log10
from typing import Any

from meshwright.report.charts import FIXED, Key, Plot, Values, axis, folded, plain, shared_layout
from meshwright.report.colours import CURVES, variable
from meshwright.report.compare_curves import DASHES
from meshwright.report.sweep import Document, drawn_kinds, plan_of, speed_of, speed_unit, swept_title, value_of

HEIGHT = 380


@dataclass(frozen=True, kw_only=True)
class SweepChart:
    """One figure over the sweep."""

    title: str
    note: str
    unit: str
    amount: Callable[[dict[str, Any]], float]
    """The drawn number of a plan."""
    from_zero: bool = False
    """Whether the axis starts at 0; if not, it spans the lines, which may be close together."""
    limit: float | None = None
    """The device's memory, drawn as a dashed line."""


def sweep_charts(document: Document) -> list[tuple[SweepChart, Plot]]:
    """The figures of a sweep: speed per device, and memory."""
    unit = speed_unit(document)
    rooms = {point["room_gib"] for point in document["points"]}
    speed = SweepChart(
        title="Speed",
        note=f"{unit.capitalize()} per device, of the fastest plan of each kind that fits.",
        unit=f"{unit} per device",
        amount=lambda plan: speed_of(plan, per_device=True),
    )
    memory = SweepChart(
        title="Memory",
        note="Reserved on the fullest rank. The dashed line is the device memory available to tensors.",
        unit="GiB",
        amount=lambda plan: float(plan["reserved_gib"]),
        from_zero=True,
        limit=rooms.pop() if len(rooms) == 1 else None,
    )
    return [(chart, sweep_plot(document, chart)) for chart in (speed, memory)]


def sweep_plot(document: Document, chart: SweepChart) -> Plot:
    kinds, styles = drawn_kinds(document), cycle(product(DASHES, CURVES))
    lines = [(kind, colour, dash) for kind, (dash, colour) in zip(kinds, styles, strict=False)]
    keys = [
        Key(label=kind, colour=colour, traces=(number,), line=dash) for number, (kind, colour, dash) in enumerate(lines)
    ]
    return Plot(
        words=_words(document, chart, kinds),
        data=[_trace(document, chart, *line) for line in lines],
        layout=_layout(document, chart),
        legends=(("", tuple(keys)),),
        config=FIXED,
    )


def _words(document: Document, chart: SweepChart, kinds: list[str]) -> str:
    """Description of a figure for screen readers."""
    ends = []
    for kind in kinds:
        found = [(point, plan) for point in document["points"] if (plan := plan_of(point, kind))]
        shown = [f"{chart.amount(plan):,.0f} at {value_of(document, point['value'])}" for point, plan in found]
        ends.append(f"{kind} {shown[0]}" + (f" to {shown[-1]}" if len(shown) > 1 else ""))
    return f"{chart.title} in {chart.unit} over {document['quantity']}, a line for each kind: {'; '.join(ends)}"


def _trace(document: Document, chart: SweepChart, kind: str, colour: str, dash: str) -> Values:
    plans = [plan_of(point, kind) for point in document["points"]]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(kind),
        "x": [point["value"] for point in document["points"]],
        "y": [plan and chart.amount(plan) for plan in plans],
        "line": {"color": variable(colour), "dash": dash, "width": 2},
        "marker": {"color": variable(colour), "size": 7},
        "connectgaps": False,
        "hoverinfo": "text",
        "hovertext": [
            "" if plan is None else _tip(document, chart, point, plan)
            for point, plan in zip(document["points"], plans, strict=True)
        ],
    }


def _tip(document: Document, chart: SweepChart, point: dict[str, Any], plan: dict[str, Any]) -> str:
    amount = f"{chart.amount(plan):,.1f} {chart.unit}"
    return f"{folded(plan['strategy'])}<br>{value_of(document, point['value'])}: <b>{plain(amount)}</b>"


def _layout(document: Document, chart: SweepChart) -> Values:
    values = [point["value"] for point in document["points"]]
    edge = 0.04 * (log10(values[-1] / values[0]) or 1.0)
    marks = {crossing["value"]: crossing["kind"] for crossing in document["crossings"]}
    return shared_layout(
        HEIGHT,
        margin={"l": 80, "r": 16, "t": 36, "b": 48},
        xaxis=axis(
            type="log",
            title={"text": swept_title(document)},
            range=[log10(values[0]) - edge, log10(values[-1]) + edge],
            tickvals=values,
            ticktext=[f"{value:,g}" for value in values],
            fixedrange=True,
        ),
        yaxis=axis(
            title={"text": chart.unit, "standoff": 12},
            rangemode="tozero" if chart.from_zero else "normal",
            fixedrange=True,
        ),
        shapes=[*(_mark(value) for value in marks), *([] if chart.limit is None else [_limit(chart.limit)])],
        annotations=[_name(value, kind) for value, kind in marks.items()],
    )


def _mark(value: float) -> Values:
    """A dotted line where a kind takes the lead."""
    line = {"color": variable("quiet"), "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 1, "line": line}


def _name(value: float, kind: str) -> Values:
    place = {"xref": "x", "x": log10(value), "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
    return {**place, "text": plain(kind), "font": {"size": 11, "color": variable("quiet")}}


def _limit(room: float) -> Values:
    line = {"color": variable("limit"), "width": 2, "dash": "4px,3px"}
    return {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": room, "y1": room, "line": line}
