"""A comparison for the terminal and as CSV. Only formats what was computed before."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from meshwright.errors import OutputError
from meshwright.report.html import write_file
from meshwright.report.strategy_table import StrategyTable, needed_width
from meshwright.report.terms import Prose, Terms

Row = dict[str, Any]

COLUMNS = (
    *("strategy", "status", "step ms", "spread", "speed", "/s", "peak MiB", "comm", "exposed", "bubble", "loss"),
    *("forecast ms", "forecast MiB"),
)
MOST_TELLING = ("status", "step ms", "spread", "speed", "peak MiB", "loss")
"""Columns that come first where the others do not fit beside them."""
LEFT = ("strategy", "status", "loss")
FIELDS = (
    *("strategy", "resolved", "status", "reason", "rounds", "step_ms", "step_ms_low", "step_ms_high", "samples_per_s"),
    *("tokens_per_s", "against_best", "peak_mib", "process_mib", "comm_share", "comm_exposed", "bubble"),
    *("loss_equal", "loss_max_rel"),
)
"""Columns of the CSV that are fields of a row; memory, time and forecast by cause follow."""


def check_folders(*files: Path | None) -> None:
    """Raise if a folder is missing, before anything runs."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise OutputError(f"Cannot write {str(file)!r}: there is no folder {str(file.parent)!r}; create it.")


def comparison_page(document: Row) -> Group:
    """The table, and the notes needed to read it."""
    parts: list[RenderableType] = [ComparisonTables(document)]
    wrong = [row for row in document["results"] if row["reason"]]
    parts += [Prose(f"{row['strategy']}: {row['status']}: {row['reason']}") for row in wrong]
    parts += [Prose(f"left out: {one['strategy']}: {one['reason']}", "dim") for one in document["left_out"]]
    if document["note"]:
        parts.append(Text(document["note"], style="dim"))
    return Group(*parts)


class ComparisonTables:
    """One table, or several if it is wider than the window, each with the strategies."""

    def __init__(self, document: Row) -> None:
        self._document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = "{job} on {ranks} {device} ranks, batch {global_batch}".format_map(self._document)
        yield Text(title, style="italic")
        yield from (comparison_table(self._document, columns) for columns in self._split(console, options))
        yield Text(
            "step: median and middle half over all rounds; speed: relative to the fastest; peak: fullest rank; comm: "
            "share of a profiled step with communication in flight, exposed: while nothing computes; bubble: idle "
            "share of a pipeline; loss: whether the first losses equal those of one process",
            style="dim",
        )

    def _split(self, console: Console, options: ConsoleOptions) -> list[list[str]]:
        """The columns of each table: all in one, or as many as fit, without the rate, which follows from the step."""

        def fits(columns: Sequence[str]) -> bool:
            return needed_width(comparison_table(self._document, columns), console, options) <= options.max_width

        if fits(COLUMNS):
            return [list(COLUMNS)]
        first, *others = COLUMNS
        tables = [[first]]
        for column in (*MOST_TELLING, *(column for column in others if column not in (*MOST_TELLING, "/s"))):
            if len(tables[-1]) > 1 and not fits([*tables[-1], column]):
                tables.append([first])
            tables[-1].append(column)
        return tables


def comparison_table(document: Row, columns: Sequence[str] = COLUMNS) -> StrategyTable:
    table = StrategyTable("", columns.index("strategy"))
    for column in columns:
        head = f"{speed_unit(document)}/s" if column == "/s" else column
        is_text = column in LEFT
        table.add_column(head, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in document["results"]:
        shown: dict[str, RenderableType] = dict(zip(COLUMNS, cells(row), strict=True))
        shown["strategy"] = Terms(row["strategy"])
        table.add_row(*(shown[column] for column in columns))
    return table


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row, for COLUMNS."""
    forecast = row["forecast"] or {}
    per_second = row["tokens_per_s"] or row["samples_per_s"]
    return (
        row["strategy"],
        "[green]ok[/]" if row["status"] == "ok" else f"[red]{row['status']}[/]",
        show(row["step_ms"], ",.1f"),
        "-" if row["step_ms"] is None else f"{row['step_ms_low']:,.0f}..{row['step_ms_high']:,.0f}",
        show(row["against_best"], ".2f"),
        show(per_second, ",.0f" if (per_second or 0) >= 100 else ".1f"),
        show(row["peak_mib"], ",.1f"),
        show(row["comm_share"], ".0%"),
        show(row["comm_exposed"], ".0%"),
        show(row["bubble"], ".0%"),
        equality(row),
        with_error(forecast.get("step_ms"), row["step_ms"]),
        with_error(forecast.get("peak_mib"), row["peak_mib"]),
    )


def show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def equality(row: Row) -> str:
    if row["loss_equal"] is None:
        return "-"
    return "equal" if row["loss_equal"] else "DIFFERS"


def with_error(forecast: float | None, measured: float | None) -> str:
    """The forecast, and its relative error."""
    if forecast is None:
        return "-"
    off = f" ({forecast / measured - 1:+.0%})" if measured else ""
    return f"{forecast:,.1f}{off}"


def speed_unit(document: Row) -> str:
    return "tokens" if any(row["tokens_per_s"] for row in document["results"]) else "samples"


def write_csv(document: Row, path: Path) -> None:
    """Write all rows, also those without figures."""
    write_file(csv_text(document), path, what="CSV")


def csv_text(document: Row) -> str:
    rows = [_flat(row) for row in document["results"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    forecast = row["forecast"] or {}
    return {
        **{name: row[name] for name in FIELDS},
        **_prefixed("memory_mib", row["memory"]),
        **_prefixed("time_ms", row["time"]),
        "forecast_step_ms": forecast.get("step_ms"),
        "forecast_peak_mib": forecast.get("peak_mib"),
        "forecast_bubble": forecast.get("bubble"),
    }


def _prefixed(prefix: str, parts: Row) -> Row:
    return {f"{prefix}: {cause}": part for cause, part in parts.items()}
