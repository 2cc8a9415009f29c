"""A comparison as one self-contained HTML file that needs no network.

        write_page(comparison.document, Path("compare.html"))

The template `compare_page.html` escapes all input and shares its style with the page of `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.compare.rank import CHECKED
from meshwright.facts.timeline import Timeline
from meshwright.report import colours
from meshwright.report.bars import TIME, Chart, Lane, Quantity
from meshwright.report.charts_bars import bar_plot
from meshwright.report.compare import equality, show, speed_unit, with_error
from meshwright.report.compare_curves import curves_plot, loss_curves
from meshwright.report.compare_mesh import draw_meshes
from meshwright.report.html import render_page, write_file
from meshwright.report.timeline import Drawing, draw
from meshwright.units import MIB, show_bytes, show_seconds

Row = dict[str, Any]

MEASURED, FORECAST = "measured", "forecast"
MEMORY = Quantity(
    key="memory",
    unit="MiB",
    colours={**colours.MEMORY, "rest": colours.MEMORY["allocator"]},
    total=lambda size: show_bytes(size * MIB),
    exact=lambda size: f"{size:,.3f} MiB",
)


def write_page(document: Row, path: Path) -> None:
    """Write the page of the document that `compare --json` prints."""
    write_file(page(document), path)


def page(document: Row) -> str:
    rows = [row for row in document["results"] if row["status"] == "ok"]
    curves = loss_curves([*rows, *(one for one in document["references"] if one["status"] == "ok")], checked=CHECKED)
    charts = (time_chart(rows), memory_chart(rows)) if rows else ()
    return render_page(
        "compare_page.html",
        has_charts=bool(charts) or curves is not None,
        document=document,
        best=rows[0] if rows else None,
        figures=_figures(rows[0], document) if rows else (),
        sentences=_sentences(rows),
        charts=[(chart, bar_plot(chart)) for chart in charts],
        curves=curves,
        curves_plot=curves_plot(curves) if curves else None,
        timelines=[_timelines(row) for row in rows if row["timeline"] is not None],
        meshes=draw_meshes(rows),
        columns=_columns(document),
        cells=[(row, _cells(row)) for row in document["results"]],
        wrong=[row for row in document["results"] if row["status"] != "ok"],
    )


def _figures(best: Row, document: Row) -> list[tuple[str, str, str]]:
    """The fastest strategy's figures: label, amount and remark."""
    unit = speed_unit(document)
    spread = f"{best['step_ms_low']:,.0f} to {best['step_ms_high']:,.0f} ms"
    figures = [
        ("step", show_seconds(best["step_ms"] / 1e3), f"middle half {spread}"),
        ("speed", f"{best['tokens_per_s'] or best['samples_per_s']:,.0f}", f"{unit}/s"),
        ("memory", show_bytes(best["peak_mib"] * MIB), "on the fullest rank"),
    ]
    if best["comm_share"] is not None:
        words = f"of the step; exposed {best['comm_exposed']:.0%}"
        figures.append(("communication", f"{best['comm_share']:.0%}", words))
    return figures


def _sentences(rows: Sequence[Row]) -> list[str]:
    """Sentences about the runner-up, the strategy with the least memory, and differing losses."""
    if not rows:
        return []
    best, *others = rows
    sentences = []
    if others:
        longer = others[0]["step_ms"] / best["step_ms"] - 1
        tie = " Their spreads overlap." if others[0]["step_ms_low"] <= best["step_ms_high"] else ""
        sentences.append(f"Next is {others[0]['strategy']}, {longer:.0%} slower.{tie}")
    leanest = min(rows, key=lambda row: float(row["peak_mib"]))
    if leanest is not best:
        held, slower = show_bytes(leanest["peak_mib"] * MIB), leanest["step_ms"] / best["step_ms"] - 1
        sentences.append(f"{leanest['strategy']} uses the least memory, {held}, and is {slower:.0%} slower.")
    differing = [row["strategy"] for row in rows if row["loss_equal"] is False]
    equal = sum(row["loss_equal"] is True for row in rows)
    if differing:
        sentences.append(f"The first losses differ from one process under {', '.join(differing)}; run verify.")
    elif equal:
        sentences.append(f"The first losses equal those of one process under all {equal} strategies.")
    return sentences


def _timelines(row: Row) -> tuple[Row, list[tuple[str, Drawing]]]:
    """A pipeline's step as measured, and as forecast."""
    found = [(key, row[key]) for key in ("timeline", "forecast_timeline") if row[key] is not None]
    names = {"timeline": "measured", "forecast_timeline": "forecast"}
    return row, [(names[key], draw(Timeline.from_json(value))) for key, value in found]


def _columns(document: Row) -> tuple[str, ...]:
    return (
        *("status", "step", "middle half", "speed", f"{speed_unit(document)}/s", "peak", "communication", "exposed"),
        *("bubble", "losses", "forecast step", "forecast peak"),
    )


def _cells(row: Row) -> tuple[str, ...]:
    forecast = row["forecast"] or {}
    spread = "-" if row["step_ms"] is None else f"{row['step_ms_low']:,.1f} to {row['step_ms_high']:,.1f}"
    return (
        row["status"],
        _with_unit(show(row["step_ms"], ",.1f"), "ms"),
        spread,
        show(row["against_best"], ".2f"),
        show(row["tokens_per_s"] or row["samples_per_s"], ",.1f"),
        _with_unit(show(row["peak_mib"], ",.1f"), "MiB"),
        show(row["comm_share"], ".1%"),
        show(row["comm_exposed"], ".1%"),
        show(row["bubble"], ".1%"),
        equality(row),
        with_error(forecast.get("step_ms"), row["step_ms"]),
        with_error(forecast.get("peak_mib"), row["peak_mib"]),
    )


def _with_unit(number: str, unit: str) -> str:
    return number if number == "-" else f"{number} {unit}"


def time_chart(rows: Sequence[Row]) -> Chart:
    note = (
        "The median step, split like a profiled step into compute, exposed communication "
        "and the rest. The thinner bar is the planner's forecast."
    )
    lanes = [_lane(row, TIME, "step_ms") for row in rows]
    return TIME.chart(note, lanes, kinds=(MEASURED, FORECAST))


def memory_chart(rows: Sequence[Row]) -> Chart:
    note = (
        "Peak of the fullest rank, without the process's baseline. Parameters, gradients and optimizer state "
        "are counted; the rest is activations, buffers and the allocator's cache. The thinner bar is the forecast."
    )
    lanes = [_lane(row, MEMORY, "peak_mib") for row in rows]
    return MEMORY.chart(note, lanes, kinds=(MEASURED, FORECAST))


def _lane(row: Row, quantity: Quantity, total: str) -> Lane:
    bars = {MEASURED: quantity.bar(row[quantity.key], row[total])}
    forecast = row["forecast"]
    if forecast and forecast.get(quantity.key):
        bars[FORECAST] = quantity.bar(forecast[quantity.key], forecast[total])
    off = (forecast or {}).get("error", {}).get(quantity.key)
    error = "" if off is None else f", forecast {off:+.0%}"
    return Lane(strategy=row["strategy"], total=f"{bars[MEASURED].total}{error}", bars=bars)
