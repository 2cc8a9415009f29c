"""Tables for the terminal, and those of `train` and `verify`. Only formats what was computed before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.units import show_bytes


def make_table(title: str | Text, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table with left-justified columns, followed by right-justified ones."""
    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def make_list(title: str | Text, *, justify: Literal["left", "right"] = "right") -> Table:
    """A table of names and values without a header."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("", style="bold")
    table.add_column("", justify=justify)
    return table


def summary_table(summary: dict[str, Any]) -> Table:
    ranks = f"{summary['ranks']} {summary['device']} rank{'s' * (summary['ranks'] > 1)}"
    table = make_list(f"{summary['strategy']} on {ranks}")
    resumed = f" (resumed at {summary['resumed_at']})" if summary["resumed_at"] else ""
    table.add_row("steps", f"{summary['steps']}{resumed}")
    if summary["stopped"]:
        table.add_row("stopped by", summary["stopped"])
    if summary["out"]:
        table.add_row("last checkpoint", "none" if summary["saved"] is None else f"step {summary['saved']}")
    table.add_row("samples", f"{summary['samples']:,}")
    table.add_row("time", f"{summary['seconds']:.1f} s")
    if summary["step_ms"] is not None:
        table.add_row("step (median)", f"{summary['step_ms']:.1f} ms")
        table.add_row("speed", f"{summary['samples_per_s']:.1f} samples/s")
    for rank, peak in enumerate(summary["peak_bytes"]):
        table.add_row(f"peak memory, rank {rank}", show_bytes(peak))
    if summary["first_loss"] is not None:
        table.add_row("loss, first step", f"{summary['first_loss']:.4f}")
        table.add_row("loss, last step", f"{summary['last_loss']:.4f}")
    return table


def verdict_table(results: Sequence[dict[str, Any]]) -> Group:
    """Each strategy's largest differences from plain PyTorch, and below it the first differences."""
    numbers = {"loss": "loss_max_rel", "grad norm": "grad_norm_max_rel", "gradients": "grad_max_rel"}
    numbers["parameters"] = "param_max_abs"
    table = make_table("compared with plain PyTorch in one process", ("strategy", "equal", "in"), tuple(numbers))
    for result in results:
        word = "NO" if result["status"] == "differs" else result["status"]
        equal = "[green]yes[/]" if result["equal"] else f"[red]{word}[/]"
        values = (_number(result[key]) for key in numbers.values())
        table.add_row(result["strategy"], equal, result["precision"] or "-", *values)
    notes = dict.fromkeys(result["note"] for result in results if result.get("note"))
    table.caption = "\n".join(("largest differences: relative, for parameters absolute", *notes))
    return Group(table, *(Text(line) for result in results for line in _reasons(result)))


def _reasons(result: dict[str, Any]) -> list[str]:
    """Why a strategy is not equal, as lines."""
    if result["equal"]:
        return []
    lines = [f"{result['strategy']} {result['status']}: {result['first_difference']}"]
    return [*lines, f"  cause: {result['cause']}"] if result["cause"] else lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
