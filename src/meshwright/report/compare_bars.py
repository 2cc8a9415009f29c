"""Bars of a comparison: what each strategy took, and below it what had been foretold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.report import colours
from meshwright.report.bars import Bar, Chart, Lane, Quantity
from meshwright.units import MIB, show_bytes, show_seconds

Row = dict[str, Any]

MEASURED, FORECAST = "measured", "forecast"
# What is measured under a name of its own has the colour of the forecast's cause that it is nearest to.
TIME = Quantity(
    key="time",
    unit="ms",
    colours={**colours.TIME, "exposed communication": colours.TIME["data"], "other": colours.TIME["host"]},
    total=lambda ms: show_seconds(ms / 1e3),
    exact=lambda ms: f"{ms:,.2f} ms",
)
MEMORY = Quantity(
    key="memory",
    unit="MiB",
    colours={**colours.MEMORY, "rest": colours.MEMORY["allocator"]},
    total=lambda size: show_bytes(size * MIB),
    exact=lambda size: f"{size:,.3f} MiB",
)


def time_chart(rows: Sequence[Row]) -> Chart:
    note = (
        "The median step, its causes by shares of a profiled step: computing, communication while nothing computes, "
        "and the rest. Below it, thinner, the planner's forecast."
    )
    return _chart("Time by cause", note, TIME, rows, "step_ms")


def memory_chart(rows: Sequence[Row]) -> Chart:
    note = (
        "At the peak of the fullest rank, without what its process takes anyway. Parameters, gradients and optimizer "
        "are counted; the rest is activations, buffers and what the allocator keeps. Below it, thinner, the forecast."
    )
    return _chart("Memory by cause", note, MEMORY, rows, "peak_mib")


def _chart(title: str, note: str, quantity: Quantity, rows: Sequence[Row], total: str) -> Chart:
    lanes = tuple(_lane(row, quantity, total) for row in rows)
    return Chart(
        title=title,
        note=note,
        unit=quantity.unit,
        lanes=lanes,
        colours={kind: quantity.colours_of(_bars(lanes, kind)) for kind in (MEASURED, FORECAST)},
    )


def _bars(lanes: Sequence[Lane], kind: str) -> list[Bar]:
    return [lane.bars[kind] for lane in lanes if kind in lane.bars]


def _lane(row: Row, quantity: Quantity, total: str) -> Lane:
    bars = {MEASURED: quantity.bar(row[quantity.key], row[total])}
    forecast = row["forecast"]
    if forecast and forecast.get(quantity.key):
        bars[FORECAST] = quantity.bar(forecast[quantity.key], forecast[total])
    off = (forecast or {}).get("error", {}).get(quantity.key)
    aside = bars[MEASURED].total + ("" if off is None else f", forecast {off:+.0%}")
    return Lane(strategy=row["strategy"], aside=aside, bars=bars)
