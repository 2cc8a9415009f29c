"""A ranking for the terminal: the table, the user's own config in it, why the first plan won, and what was refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.facts.finding import Finding
from meshwright.report.tables import Terms, make_list, make_table

REASONS = 6
"""How many kinds of refusals to list."""


def plan_page(document: dict[str, Any]) -> RenderableType:
    plans = document["plans"]
    parts: list[RenderableType] = []
    if plans:
        parts += [_table(document), _why(plans), _memory(plans[0])]
    if document.get("against"):
        parts.append(_against(document["against"]))
    parts += [Text(sentence) for sentence in document["advice"]]
    parts += [Text(Finding.from_json(found).sentence()) for found in document.get("findings", ())]
    parts.append(_refused(document))
    return Group(*parts)


def _table(document: dict[str, Any]) -> Table:
    by_tokens = all(plan["tokens_per_s_per_device"] for plan in document["plans"])
    numbers = ("step", "tokens/s/device" if by_tokens else "samples/s", "peak GiB", "reserved GiB", "mfu")
    table = make_table(f"{document['job']} on {document['cluster']}", ("strategy",), numbers)
    table.add_column("time by cause")
    theirs = place_of(document)
    for place, plan in in_order(document):
        if place > len(document["plans"]):
            table.add_section()
        table.add_row(
            Terms(f"{plan['strategy']}  <- yours, number {place}" if place == theirs else plan["strategy"]),
            _milliseconds(plan["step_ms"]),
            f"{plan['tokens_per_s_per_device'] if by_tokens else plan['samples_per_s']:,.0f}",
            f"{plan['peak_gib']:.1f}{'*' if plan['grade'] == 'trace' else ''}",
            f"{plan['reserved_gib']:.1f}",
            f"{plan['mfu']:.0%}",
            _shares(plan["time"]),
        )
    traced = any(plan["grade"] == "trace" for plan in document["plans"])
    bars = document["plans"][0]["error_bar"]
    notes = [f"memory within {bars['memory']:.0%}, time within {bars['time']:.0%}, in 3 of 4 cases"] if bars else []
    table.caption = "; ".join([*(["* traced on fake tensors"] if traced else []), *notes])
    return table


def _milliseconds(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _shares(time: dict[str, float]) -> str:
    total = sum(time.values()) or 1.0
    parts = sorted(time.items(), key=lambda part: -part[1])
    return ", ".join(f"{cause} {value / total:.0%}" for cause, value in parts if value / total >= 0.03)


def _why(plans: list[dict[str, Any]]) -> RenderableType:
    lines = Text()
    for plan in plans:
        lines.append(f"{plan['strategy']}  ", style="bold")
        lines.append(" ".join(plan["why"]) + "\n")
    return lines


def _against(against: dict[str, Any]) -> Text:
    """The user's own config: its rank, and what the first plan gains over it."""
    lines = Text(f"{against['file']} ({against['origin']})  ", style="bold")
    lines.append(" ".join([verdict(against), *against["notes"]]) + "\n", style="not bold")
    return lines


def _memory(plan: dict[str, Any]) -> Table:
    table = make_list(f"memory of {plan['strategy']}")
    for cause, size in plan["memory"].items():
        if size >= 0.005:
            table.add_row(cause, f"{size:.2f} GiB")
    if plan["stages"]:
        peaks = ", ".join(f"{stage['peak_gib']:.1f}" for stage in plan["stages"])
        table.add_row("pipeline ranks", f"{peaks} GiB")
    if plan["host_gib"]:
        table.add_row("host memory per node", f"{plan['host_gib']:.1f} GiB")
    return table


def _refused(document: dict[str, Any]) -> Text:
    """The number of candidates, and the most common reasons for refusing them."""
    counts = Counter(_kind(refusal["reason"]) for refusal in document["refused"])
    shown = Text(f"{document['candidates']:,} candidates in {document['seconds']:.1f} s; ")
    shown.append(f"{len(document['refused']):,} refused or too large:\n")
    for reason, count in counts.most_common(REASONS):
        shown.append(f"  {count:,}  {reason}\n")
    return shown


def _kind(reason: str) -> str:
    if reason.startswith("needs "):
        return "do not fit"
    return "do not fit with a smaller micro-batch either" if reason.startswith("does not fit with") else reason


def place_of(document: dict[str, Any]) -> int | None:
    """The config's rank among the plans, from 1; None if there is no config or it cannot run."""
    against = document.get("against")
    return against["rank"] if against else None


def in_order(document: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every plan with its rank, including the user's: between two others, instead of its equal, or after the last."""
    plans, place = document["plans"], place_of(document)
    if place is None:
        yield from enumerate(plans, 1)
        return
    theirs = document["against"]["plan"]
    others = [plan for plan in plans if plan["strategy"] != theirs["strategy"]]
    before = min(place - 1, len(others))
    yield from enumerate(others[:before], 1)
    yield place, theirs
    yield from enumerate(others[before:], before + 2)


def verdict(against: dict[str, Any]) -> str:
    """The config's rank or the reason it has none, and what the first plan gains over it."""
    if against["rank"] is None:
        reason = against["reason"].rstrip(".")
        return f"{against['strategy']}: {reason}. {against['gain']}"
    return f"{against['strategy']} is number {against['rank']}. {against['gain']}"
