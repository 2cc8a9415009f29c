"""The forecast of every measured run, as a table to read with other programs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from meshwright.planner.measured_runs import SkippedRow
from meshwright.planner.scores import ScoredRun
from meshwright.units import GIB

COLUMNS = (
    *(
        "row",
        "arch",
        "gpu",
        "n_gpus",
        "nodes",
        "axes",
        "ran",
        "forecast_fits",
        "peak_mem_gib",
        "forecast_peak_gib",
        "memory_error",
    ),
    *("step_s", "forecast_step_s", "time_error", "tok_s_gpu", "forecast_tok_s_gpu", "reason"),
)


def forecasts_csv(outcomes: Sequence[ScoredRun], skipped: Sequence[SkippedRow]) -> str:
    """One line for each row: measured values, forecasts and errors. A skipped row has its name and the reason."""
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_line(outcome) for outcome in outcomes)
    writer.writerows({"row": row.name, "reason": f"skipped: {row.reason}"} for row in skipped)
    return text.getvalue()


def _line(outcome: ScoredRun) -> dict[str, object]:
    row, account = outcome.row, outcome.account
    line: dict[str, object] = {
        "row": row.name,
        "arch": row.arch,
        "gpu": row.cluster.device,
        "n_gpus": row.cluster.devices,
        "nodes": row.cluster.nodes,
        "axes": "+".join(row.axes),
        "ran": row.fits,
        "forecast_fits": outcome.fits,
        "peak_mem_gib": _number(row.peak_gib),
        "memory_error": _number(outcome.memory_error),
        "step_s": _number(row.step),
        "time_error": _number(outcome.time_error),
        "tok_s_gpu": _number(row.tokens_per_s),
        "reason": outcome.reason,
    }
    if account is not None:
        step = account.timing.total
        tokens = row.step_layout.samples * row.shape.length / (step * row.cluster.devices)
        line |= {
            "forecast_peak_gib": _number(account.ranks[0].peak / GIB),
            "forecast_step_s": _number(step),
            "forecast_tok_s_gpu": _number(tokens),
        }
    return line


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
