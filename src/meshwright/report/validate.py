"""The planner's scores, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.planner.scores import ScoredRun
from meshwright.report.tables import make_table

LISTED = 12
"""Rows that a list names."""


def validate_page(document: dict[str, Any], outcomes: Sequence[ScoredRun], worst: int) -> RenderableType:
    table = make_table(f"{document['rows']} measured runs", ("",), ("rows", "mean error", "median error", "bias"))
    for name in ("memory", "time"):
        found = document[name]
        shares = [_share(found[key]) for key in ("mape", "median_abs", "median_signed")]
        table.add_row(name, str(found["n"]), *shares)
    fit, regret = document["fit"], document["regret"]
    lines = Text(f"fit: predicted {_share(fit['recall'])} of the failures, false alarms {_share(fit['false_alarm'])}\n")
    lines.append(f"regret of the first plan: median {_share(regret['median'])}, ")
    lines.append(f"nine in ten below {_share(regret['p90'])} ({regret['cells']} cells)\n")
    return Group(table, lines, _skipped(document), _groups(document), _unexplained(outcomes), _worst(outcomes, worst))


def _skipped(document: dict[str, Any]) -> Text:
    skipped = document["skipped"]
    if not skipped:
        return Text("")
    listed = "".join(f"  {row['row']}: {row['reason']}\n" for row in skipped[:LISTED])
    more = f"  and {len(skipped) - LISTED} more (--json lists all)\n" if len(skipped) > LISTED else ""
    return Text(f"rows that are not scored: {len(skipped)}\n{listed}{more}")


def _groups(document: dict[str, Any]) -> RenderableType:
    ((column, groups),) = document["groups"].items()
    if len(groups) < 2:
        return Text("")
    heads = ("rows", "memory, mean error", "time, mean error", "failures predicted", "false alarms")
    table = make_table(f"by {column}", (column,), heads)
    for value, found in groups.items():
        shares = (found["memory"]["mape"], found["time"]["mape"], found["fit"]["recall"], found["fit"]["false_alarm"])
        table.add_row(value or "-", str(found["rows"]), *map(_share, shares))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _unexplained(outcomes: Sequence[ScoredRun]) -> Text:
    names = [outcome.row.name for outcome in outcomes if not outcome.row.fits and outcome.fits]
    if not names:
        return Text("")
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return Text(f"failed although the forecast fits (another cause, or a wrong forecast): {len(names)} ({listed})\n")


def _worst(outcomes: Sequence[ScoredRun], count: int) -> RenderableType:
    table = make_table("largest errors", ("row",), ("memory", "time"))
    known = [o for o in outcomes if o.memory_error is not None or o.time_error is not None]
    known.sort(key=lambda o: -max(abs(o.memory_error or 0), abs(o.time_error or 0)))
    for outcome in known[:count]:
        table.add_row(outcome.row.name, _signed(outcome.memory_error), _signed(outcome.time_error))
    return table if count else Text("")


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.0%}"
