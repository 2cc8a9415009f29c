"""Tables for the terminal. Everything shown was computed before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from meshwright.units import show_bytes


def summary_table(summary: dict[str, Any]) -> Table:
    """What a training run came to."""
    ranks = f"{summary['ranks']} {summary['device']} rank{'s' * (summary['ranks'] > 1)}"
    table = Table(title=f"{summary['strategy']} on {ranks}", title_justify="left", show_header=False)
    table.add_column("", style="bold")
    table.add_column("", justify="right")
    steps = str(summary["steps"])
    if summary["resumed_at"]:
        steps += f" (resumed at {summary['resumed_at']})"
    table.add_row("steps", steps)
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


def verdict_table(results: Sequence[dict[str, Any]]) -> Table:
    """How strategies compare with one process."""
    table = Table(title="against one process", title_justify="left")
    for column in ("strategy", "equal", "loss", "grad norm", "parameters", "first difference"):
        table.add_column(column, justify="right" if column in ("loss", "grad norm", "parameters") else "left")
    for result in results:
        equal = "[green]yes[/]" if result["equal"] else "[red]NO[/]"
        table.add_row(
            result["strategy"],
            equal,
            _number(result["loss_max_rel"]),
            _number(result["grad_norm_max_rel"]),
            _number(result["param_max_abs"]),
            result["first_difference"] or "",
        )
    notes = dict.fromkeys(result["note"] for result in results if result.get("note"))
    table.caption = "\n".join(("largest differences: loss and gradient norm relative, parameters absolute", *notes))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
