"""Bar charts of a comparison: each strategy's measurement, and below it its forecast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.report import colours
from meshwright.report.bars import Chart, Lane, Quantity
from meshwright.units import MIB, show_bytes, show_seconds

Row = dict[str, Any]

MEASURED, FORECAST = "measured", "forecast"
# Causes that exist only in measurements get the colour of the nearest forecast cause.
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
        "The median step, split like a profiled step into compute, exposed communication "
        "and the rest. The thinner bar is the planner's forecast."
    )
    return _chart("Time by cause", note, TIME, rows, "step_ms")


def memory_chart(rows: Sequence[Row]) -> Chart:
    note = (
        "Peak of the fullest rank, without the process's baseline. Parameters, gradients and optimizer state "
        "are counted; the rest is activations, buffers and the allocator's cache. The thinner bar is the forecast."
    )
    return _chart("Memory by cause", note, MEMORY, rows, "peak_mib")


def _chart(title: str, note: str, quantity: Quantity, rows: Sequence[Row], total: str) -> Chart:
    lanes = tuple(_lane(row, quantity, total) for row in rows)
    return Chart(
        title=title,
        note=note,
        unit=quantity.unit,
        lanes=lanes,
        colours={
            kind: quantity.colours_of([lane.bars[kind] for lane in lanes if kind in lane.bars])
            for kind in (MEASURED, FORECAST)
        },
    )


def _lane(row: Row, quantity: Quantity, total: str) -> Lane:
    bars = {MEASURED: quantity.bar(row[quantity.key], row[total])}
    forecast = row["forecast"]
    if forecast and forecast.get(quantity.key):
        bars[FORECAST] = quantity.bar(forecast[quantity.key], forecast[total])
    off = (forecast or {}).get("error", {}).get(quantity.key)
    error = "" if off is None else f", forecast {off:+.0%}"
    return Lane(strategy=row["strategy"], total=f"{bars[MEASURED].total}{error}", bars=bars)
