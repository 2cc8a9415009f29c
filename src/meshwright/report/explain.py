"""A step of a job under a strategy for the terminal: what each rank gathers, computes, sends and frees, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.facts.walk import OPTIMIZER, PASSES
from meshwright.report.terms import Prose
from meshwright.units import show_bytes, show_count, show_seconds

VERBS = ("gathers", "computes", "sends", "frees")
COLUMNS = ("where", *VERBS, "holds at most")
GATHERS, SHARDED = "all_gather", ("data", "shard")
"""The kind of messages that bring a rank the parameters that it does not hold, and their axes."""


@dataclass(frozen=True, kw_only=True)
class WalkRow:
    """One row of the table: a visit, or consecutive visits that do the same in modules of a kind."""

    phase: str
    first: str
    last: str
    micro_batch: int
    cells: tuple[str, ...]
    """gathers, computes, sends, frees"""
    peak: int

    @property
    def where(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}, each"

    @property
    def all_cells(self) -> tuple[str, ...]:
        """What the columns of `COLUMNS` show."""
        return self.where, *self.cells, show_bytes(self.peak)


@dataclass(frozen=True)
class WalkPass:
    """Consecutive rows of one phase and micro-batch, or a reference to an earlier pass that did the same."""

    name: str
    rows: tuple[WalkRow, ...]
    like: str = ""

    @property
    def title(self) -> str:
        if not self.like:
            return self.name
        return f"{self.name}: as {'before' if self.like == self.name else self.like}"


def explain_page(document: dict[str, Any]) -> Group:
    parts: list[RenderableType] = [Prose("", lead=headline(document))]
    parts += [Text(f"{one['term']}: {one['summary']}") for one in document["summaries"]]
    parts.append(Text(forecast_sentence(document)))
    for walk in document["walks"]:
        parts += [Text(), *_lines(walk)]
    return Group(*parts)


def headline(document: dict[str, Any]) -> str:
    return (
        f"One step of {document['job']} under {document['strategy']} on {document['cluster']}, "
        f"global batch {document['global_batch']}"
    )


def forecast_sentence(document: dict[str, Any]) -> str:
    forecast = document["forecast"]
    causes = ", ".join(f"{cause} {show_seconds(ms / 1e3)}" for cause, ms in forecast["time"].items() if ms)
    return f"The planner expects {show_seconds(forecast['step_ms'] / 1e3)} a step: {causes}."


def walk_sentence(walk: dict[str, Any]) -> str:
    """Where the rank holds most, what it computes, and what it sends."""
    at = walk["peak_at"]
    most = sorted(walk["peak_held"].items(), key=lambda item: -item[1])[:3]
    held = ", ".join(f"{cause} {show_bytes(size)}" for cause, size in most)
    sent = "; ".join(
        f"{one['count']} {_verb(one['kind'])}{'s' * (one['count'] > 1)} {_receivers(one)}, "
        f"{show_bytes(one['bytes'])} in {show_seconds(one['ms'] / 1e3)}"
        for one in walk["messages"]
    )
    return (
        f"It holds most in {at['phase']} of {place_name(at['module'])}: {show_bytes(walk['peak_bytes'])} ({held}). "
        f"It computes {show_count(walk['flops'])} FLOPs in {show_seconds(walk['compute_ms'] / 1e3)}. "
        f"{f'It sends {sent}.' if sent else 'It sends nothing.'}"
    )


def rank_name(walk: dict[str, Any]) -> str:
    stages = ", ".join(map(str, walk["stages"]))
    return f"rank {walk['rank']}" + (f", stage {stages}" if stages else "")


def passes_of(walk: dict[str, Any]) -> list[WalkPass]:
    """The walk in passes; one that does what an earlier pass did is named after it."""
    known: dict[tuple[Any, ...], str] = {}
    found = []
    for name, group in groupby(walk["visits"], key=_pass_name):
        rows = tuple(_rows(list(group)))
        key = tuple((row.phase, row.first, row.last, row.cells) for row in rows)
        found.append(WalkPass(name, rows, known.get(key, "")))
        known.setdefault(key, name)
    return found


def _pass_name(visit: dict[str, Any]) -> str:
    if visit["module"] in (OPTIMIZER, PASSES):
        return {OPTIMIZER: "update", PASSES: "between passes"}[visit["module"]]
    return f"{visit['phase']} of micro-batch {visit['micro_batch']}"


def _rows(visits: list[dict[str, Any]]) -> Iterator[WalkRow]:
    """Rows of one pass, with alike neighbours joined."""
    open_: WalkRow | None = None
    for visit in visits:
        row = _row(visit)
        if open_ is not None and _is_alike(open_, row):
            open_ = replace(open_, last=row.last, peak=max(open_.peak, row.peak))
            continue
        if open_ is not None:
            yield open_
        open_ = row
    if open_ is not None:
        yield open_


def _is_alike(one: WalkRow, other: WalkRow) -> bool:
    names = [name.rpartition(".")[0] for name in (one.first, other.first)]
    return one.cells == other.cells and names[0] == names[1] != ""


def _row(visit: dict[str, Any]) -> WalkRow:
    name = place_name(visit["module"])
    gathers = [one for one in visit["messages"] if _gathers_parameters(one, visit)]
    others = [one for one in visit["messages"] if not _gathers_parameters(one, visit)]
    flops = f"{show_count(visit['flops'])} FLOPs, " if visit["flops"] else ""
    computes = f"{flops}{show_seconds(visit['compute_ms'] / 1e3)}"
    cells = (
        ", ".join(message_words(one).removeprefix(f"{_verb(GATHERS)} ") for one in gathers),
        computes if visit["kernels"] else "",
        ", ".join(map(message_words, others)),
        show_bytes(visit["freed_bytes"]) if visit["freed_bytes"] else "",
    )
    peak = sum(visit["held"].values())
    micro = visit["micro_batch"]
    return WalkRow(phase=visit["phase"], first=name, last=name, micro_batch=micro, cells=cells, peak=peak)


def place_name(module: str) -> str:
    return module or "(between modules)"


def message_words(message: dict[str, Any]) -> str:
    times = f"{message['count']} x " if message["count"] > 1 else ""
    size, time = show_bytes(message["bytes"]), show_seconds(message["ms"] / 1e3)
    kind = "" if message["kind"] == "send" else f"{_verb(message['kind'])} "
    return f"{times}{kind}{size} {_receivers(message)}, {time}"


def _verb(kind: str) -> str:
    return kind.replace("_", "-")


def _gathers_parameters(message: dict[str, Any], visit: dict[str, Any]) -> bool:
    return message["kind"] == GATHERS and message["axis"] in SHARDED and visit["gathered_bytes"] > 0


def _receivers(message: dict[str, Any]) -> str:
    if message["kind"] == "send":
        return "to a neighbouring stage"
    return f"over {message['ranks']} {message['axis']} ranks"


def _lines(walk: dict[str, Any]) -> Iterator[RenderableType]:
    """The walk in passes, with a line for each row."""
    yield Text(rank_name(walk), style="bold")
    yield Text(walk_sentence(walk))
    for one in passes_of(walk):
        yield Text(one.title, style="italic")
        table = Table.grid(Column(width=24), Column(), padding=(0, 1), pad_edge=True)
        for row in () if one.like else one.rows:
            words = [f"{verb} {cell}" for verb, cell in zip(VERBS, row.cells, strict=True) if cell]
            table.add_row(row.where, "; ".join([*words, f"holds {show_bytes(row.peak)}"]))
        if table.row_count:
            yield table
