"""Tables for the terminal, and the tables of `train` and `verify`. Only formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.report.strategy_table import FirstThatFits, StrategyTable, strategy_table, with_columns
from meshwright.report.terms import Prose, Terms
from meshwright.units import GIB, show_bytes


def make_table(title: str | Text, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table with left-justified columns, followed by right-justified ones."""
    return with_columns(Table(title=title, title_justify="left"), left, right)


TITLE = 76
"""The longest title that a list is widened for, which fits a window of 80 columns."""


def make_list(title: str | Text, *, justify: Literal["left", "right"] = "right") -> Table:
    """A table of names and values without a header, wide enough for its title."""
    table = Table(
        title=title,
        title_justify="left",
        show_header=False,
        min_width=min(max(map(len, str(title).split("\n"))), TITLE),
    )
    table.add_column("", style="bold")
    table.add_column("", justify=justify)
    return table


TOLD_START_UP = 1.0
"""Seconds of start-up from which a summary tells them."""


def summary_page(summary: dict[str, Any]) -> Group:
    ranks = f"{summary['ranks']} {summary['device']} rank{'s' * (summary['ranks'] > 1)}"
    table = make_list("")
    resumed = f" (resumed at {summary['resumed_at']})" if summary["resumed_at"] else ""
    table.add_row("steps", f"{summary['steps']}{resumed}")
    table.add_row("epochs completed", str(summary["epochs"]))
    if summary["stopped"]:
        table.add_row("stopped by", summary["stopped"])
    if summary["out"]:
        table.add_row("last checkpoint", "none" if summary["saved"] is None else f"step {summary['saved']}")
    table.add_row("samples", f"{summary['samples']:,}")
    table.add_row("time", f"{summary['seconds']:.1f} s")
    if (summary["start_up_s"] or 0.0) >= TOLD_START_UP:
        compiled = ", compiling" if "compile" in summary["strategy"].split(",") else ""
        table.add_row("of this, start-up", f"{summary['start_up_s']:.1f} s in the first steps{compiled}")
    if summary["step_ms"] is not None:
        table.add_row("step (median)", f"{summary['step_ms']:.1f} ms")
        table.add_row("speed", f"{summary['samples_per_s']:.1f} samples/s")
    for rank, peak in enumerate(summary["peak_bytes"]):
        table.add_row(f"peak memory, rank {rank}", show_bytes(peak))
    if summary["first_loss"] is not None:
        table.add_row("loss, first step", f"{summary['first_loss']:.4f}")
        table.add_row("loss, last step", f"{summary['last_loss']:.4f}")
    for name, value in (summary["evaluation"] or {}).items():
        if name != "step":
            shown = "not finite" if value is None else f"{value:.4f}"
            table.add_row(Text(f"evaluation, {name}"), f"{shown} (step {summary['evaluation']['step']})")
    if found := summary.get("forecast"):
        table.add_row(f"forecast by {found['forecast']['source']}", Text(forecast_words(found)))
    if found := summary["early_stop"]:
        best = "never finite" if found["best"] is None else f"best {found['best']:.4f} at step {found['best_step']}"
        table.add_row("stopped early by", Text(f"{found['metric']}, {best}"))
    if summary.get("limit"):
        table.caption, table.caption_justify = Text(" ".join(_limits(summary))), "left"
    return Group(Prose(f"{summary['strategy']} on {ranks}", "italic"), table)


def forecast_words(found: dict[str, Any]) -> str:
    """Forecast against measured in one line."""
    forecast, errors = found["forecast"], found["error"]
    parts = []
    if errors["memory"] is not None:
        parts.append(f"peak {show_bytes(forecast['peak_gib'] * GIB)} ({errors['memory']:+.1%})")
    if errors["time"] is not None:
        parts.append(f"step {forecast['step_ms']:.1f} ms ({errors['time']:+.1%})")
    return f"{', '.join(parts) or 'nothing to compare'} on {forecast['cluster']}"


def _limits(summary: dict[str, Any]) -> list[str]:
    """What limited the run, and what to try."""
    return [summary["limit"]["sentence"], *filter(None, [summary.get("advice")])]


DIFFERENCES = {
    "loss": "loss_max_rel",
    "grad norm": "grad_norm_max_rel",
    "gradients": "grad_max_rel",
    "parameters": "param_max_abs",
}
"""Columns of a verdict."""
MOST_TELLING = ("loss", "gradients")
"""Those that a narrow window has room for; --json has all."""


def verdict_page(results: Sequence[dict[str, Any]]) -> Group:
    """Each strategy's largest differences from plain PyTorch, and below it the first differences."""
    tables = FirstThatFits(_verdicts(results, tuple(DIFFERENCES)), _verdicts(results, MOST_TELLING, narrow=True))
    return Group(tables, *(Prose(line) for result in results for line in _reasons(result)))


def _verdicts(results: Sequence[dict[str, Any]], names: Sequence[str], *, narrow: bool = False) -> StrategyTable:
    """A row for each strategy; in a narrow window the precision is a line below it."""
    title = "compared with plain PyTorch in one process"
    table = strategy_table(title, ("strategy", "equal", *(() if narrow else ("in",))), names)
    for result in results:
        word = "NO" if result["status"] == "differs" else result["status"]
        equal = "[green]yes[/]" if result["equal"] else f"[red]{word}[/]"
        precision = result["precision"] or "-"
        values = (_number(result[DIFFERENCES[name]]) for name in names)
        strategy = Terms(result["strategy"], f"in {precision}" if narrow else "")
        table.add_row(strategy, equal, *([] if narrow else [precision]), *values)
    notes = dict.fromkeys(result["note"] for result in results if result.get("note"))
    table.caption = "\n".join(("largest differences: relative, for parameters absolute", *notes))
    return table


def _reasons(result: dict[str, Any]) -> list[str]:
    """Why a strategy is not equal, as lines."""
    if result["equal"]:
        return []
    lines = [f"{result['strategy']} {result['status']}: {result['first_difference']}"]
    return [*lines, f"  cause: {result['cause']}"] if result["cause"] else lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
