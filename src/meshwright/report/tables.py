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
    """How strategies compare with plain PyTorch."""
    table = Table(title="against plain PyTorch in one process", title_justify="left")
    numbers = ("loss", "grad norm", "gradients", "parameters")
    for column in ("strategy", "equal", "in", *numbers, "first difference"):
        table.add_column(column, justify="right" if column in numbers else "left")
    for result in results:
        status = result["status"]
        table.add_row(
            result["strategy"],
            "[green]yes[/]" if result["equal"] else f"[red]{'NO' if status == 'differs' else status}[/]",
            result["precision"] or "-",
            *(_number(result[key]) for key in ("loss_max_rel", "grad_norm_max_rel", "grad_max_rel", "param_max_abs")),
            "\n".join(line for line in (result["first_difference"], _because(result["cause"])) if line),
        )
    notes = dict.fromkeys(result["note"] for result in results if result.get("note"))
    largest = "largest differences: loss, gradient norm and gradients relative, parameters absolute"
    table.caption = "\n".join((largest, *notes))
    return table


def _because(cause: str | None) -> str:
    return f"cause: {cause}" if cause else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
