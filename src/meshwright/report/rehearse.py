"""The results of `rehearse` for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.facts.forecast import MEMORY_CAUSES
from meshwright.report.strategy_table import FirstThatFits, StrategyTable, strategy_table
from meshwright.report.tables import make_table
from meshwright.report.terms import Prose, Terms
from meshwright.units import GIB, show_bytes, show_seconds

ROWS = ("allocated", "reserved", "compute", "step")
"""Figures of a rehearsal, in the order in which they are shown."""


def rehearsal_page(document: dict[str, Any]) -> Group:
    parts: list[RenderableType] = [Prose("", lead=headline(document)), Prose(verdict(document)), _table(document)]
    if document["roles"]:
        parts.append(_roles(document["roles"]))
    parts += [Prose(line) for line in remarks(document)]
    return Group(*parts)


def headline(document: dict[str, Any]) -> str:
    return (
        f"{document['job']} under {document['strategy']}, global batch {document['global_batch']}: rank "
        f"{document['rank']} of {document['world']}, rehearsed on {document['device'] or 'this machine'}"
    )


def verdict(document: dict[str, Any]) -> str:
    """Whether it fits, in a sentence."""
    limit = show_bytes(document["limit_gib"] * GIB)
    if document["status"] == "ok":
        room = document["room_gib"] * GIB
        if document["fits"]:
            return f"It fits into {limit}, with {show_bytes(room)} of room."
        return f"It ran, but needs {show_bytes(-room)} more than {limit}."
    if document["status"] == "out of memory":
        return out_of_memory(document["measured"], limit)
    return f"It did not run ({document['status']}): {document['reason']}"


def out_of_memory(measured: dict[str, Any], limit: str) -> str:
    at, wanted = measured["peak_at"], measured["wanted_gib"]
    place = f"in {at['phase']}{' of ' + at['module'] if at['module'] else ''}" if at else "while it was built"
    held = sorted(measured["memory"].items(), key=lambda item: -item[1])
    causes = ", ".join(f"{cause} {show_bytes(size * GIB)}" for cause, size in held if size)
    more = f" and another {show_bytes(wanted * GIB)} was asked for" if wanted else ""
    return (
        f"It does not fit into {limit}: memory ran out {place}, when {show_bytes((measured['peak_gib'] or 0) * GIB)} "
        f"was held ({causes}){more}."
    )


def figures(document: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, measured, forecast and error of each figure that there is."""
    measured, forecast, errors = document["measured"], document["forecast"], document["error"]
    yield "allocated", _gib(measured["peak_gib"]), _gib(forecast["peak_gib"]), _share(errors["memory"])
    if measured["reserved_gib"] is not None or forecast["reserved_gib"] is not None:  # not on a CPU
        yield "reserved", _gib(measured["reserved_gib"]), _gib(forecast["reserved_gib"]), _share(errors["reserved"])
    yield "compute", _ms(measured["compute_ms"]), _ms(forecast["compute_ms"]), _share(errors["time"])
    yield "step, with communication", _ms(measured["step_ms"]), _ms(forecast["step_ms"]), ""
    for cause in sorted({**measured["memory"], **forecast["memory"]}, key=place_of_cause):
        yield f"  {cause}", _gib(measured["memory"].get(cause)), _gib(forecast["memory"].get(cause)), ""


def place_of_cause(cause: str) -> int:
    """Where a cause of memory stands, so that measured and forecast ones have one order."""
    return MEMORY_CAUSES.index(cause) if cause in MEMORY_CAUSES else len(MEMORY_CAUSES)


def remarks(document: dict[str, Any]) -> list[str]:
    """Notes, and what to change if it does not fit."""
    at = document["measured"]["peak_at"]
    found = []
    if document["status"] == "ok" and at:
        found.append(f"It held most in {at['phase']}{' of ' + at['module'] if at['module'] else ''}.")
    found += [f"note: {note}" for note in dict.fromkeys(document["notes"])]
    change = document["change"]
    if change is None:
        return found
    found += [f"{one['strategy']} was rehearsed too: {_outcome(one)}." for one in change["tried"]]
    if change["strategy"] is None:
        return [*found, change["advice"]]
    rehearsal = change["rehearsal"]
    held = show_bytes((document["limit_gib"] - rehearsal["room_gib"]) * GIB)
    return [
        *found,
        f"The smallest change that fits: {', '.join(change['changed'])}. {change['strategy']} was rehearsed: {held}, "
        f"{_ms(rehearsal['measured']['step_ms'])} a step.",
    ]


def tuning_page(document: dict[str, Any]) -> Group:
    title = f"{document['job']} on {document['cluster']}, global batch {document['global_batch']}"
    chosen = document["strategy"] or "no strategy fits"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Prose(chosen, "bold green", lead="Use: "),
        trials_table(document),
    ]
    return Group(*parts, *(Prose(line) for line in document["why"]))


def trials_table(document: dict[str, Any]) -> FirstThatFits:
    """All trials; a narrow window has no room for the forecasts."""
    return FirstThatFits(_trials(document, forecasts=True), _trials(document, forecasts=False))


def _trials(document: dict[str, Any], *, forecasts: bool) -> StrategyTable:
    numbers = ("step", "forecast", "memory", "forecast") if forecasts else ("step", "memory")
    table = strategy_table("trials, in order", ("strategy", "fits"), numbers)
    for trial in document["trials"]:
        strategy, fits, step, step_told, memory, memory_told = trial_cells(trial)
        cells = (step, step_told, memory, memory_told) if forecasts else (step, memory)
        table.add_row(Terms(strategy), fits, *cells)
    return table


def trial_cells(trial: dict[str, Any]) -> tuple[str, ...]:
    told = trial["forecast"]
    fits = "yes" if trial["fits"] else "no"
    return (
        trial["strategy"],
        fits,
        _ms(trial["step_ms"]),
        _ms(told["step_ms"]),
        _gib(trial["held_gib"]),
        _gib(told["reserved_gib"]),
    )


def _table(document: dict[str, Any]) -> Table:
    table = make_table("measured against forecast", ("",), ("measured", "forecast", "error"))
    for row in figures(document):
        table.add_row(*row)
    return table


def _roles(roles: list[dict[str, Any]]) -> FirstThatFits:
    """A row for each role; a narrow window has no room for forecasts and reserved memory."""
    heads = ("rank", "result", "allocated", "forecast", "error", "reserved", "compute", "error")
    every, few = range(len(heads)), (0, 1, 2, 4, 6, 7)
    tables = []
    for places in (every, few):
        names = [heads[place] for place in places]
        tables.append(make_table("roles", names[:2], names[2:]))
        for role in roles:
            tables[-1].add_row(*(role_cells(role)[place] for place in places))
    return FirstThatFits(*tables)


def role_cells(role: dict[str, Any]) -> tuple[str, ...]:
    measured, errors = role["measured"], role["error"]
    return (
        str(role["rank"]),
        "fits" if role["fits"] else role["status"] if role["status"] != "ok" else "too large",
        _gib(measured["peak_gib"]),
        _gib(role["forecast"]["peak_gib"]),
        _share(errors["memory"]),
        _gib(measured["reserved_gib"]),
        _ms(measured["compute_ms"]),
        _share(errors["time"]),
    )


def _outcome(role: dict[str, Any]) -> str:
    return role["status"] if role["status"] != "ok" else "it needs more, too"


def _gib(size: float | None) -> str:
    return "" if size is None else show_bytes(size * GIB)


def _ms(ms: float | None) -> str:
    return "" if ms is None else show_seconds(ms / 1e3)


def _share(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"
