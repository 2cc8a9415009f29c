"""A sweep for the terminal, and what its page shows too: which kinds are drawn, and sentences about crossings."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from meshwright.report.plan import step_time
from meshwright.report.strategy_table import FirstThatFits, StrategyTable, needed_width, strategy_table
from meshwright.report.terms import Prose, Terms
from meshwright.units import show_count

Document = dict[str, Any]
DRAWN = 8
"""Kinds of strategies that a table and a chart show."""


def sweep_page(document: Document, drawn: int = DRAWN) -> RenderableType:
    """The best strategy at each point, the kinds side by side, and the crossings."""
    lines = [Prose(sentence) for sentence in (*crossing_sentences(document), *document["advice"])]
    return Group(_best(document), KindTables(document, drawn), *lines, _refused(document))


def value_of(document: Document, value: float) -> str:
    """A value of the swept quantity, with its unit."""
    return f"{value:,g} {document['unit']}" if value < 1e6 else f"{value:,.0f} {document['unit']}"


def swept_title(document: Document) -> str:
    """The swept quantity with its unit."""
    quantity, unit = document["quantity"], document["unit"]
    return quantity if quantity == unit else f"{quantity} ({unit})"


def speed_of(plan: dict[str, Any], *, per_device: bool) -> float:
    """Tokens per second, or samples if the tokens of a sample are unknown."""
    part = "_per_device" if per_device else ""
    return float(plan[f"tokens_per_s{part}"] or plan[f"samples_per_s{part}"])


def speed_unit(document: Document) -> str:
    plans = [plan for point in document["points"] for plan in point["kinds"]]
    return "tokens/s" if plans and all(plan["tokens_per_s"] for plan in plans) else "samples/s"


def drawn_kinds(document: Document, most: int = DRAWN) -> list[str]:
    """The kinds to show: those that come nearest to the fastest at some point, in that order."""
    nearest: dict[str, float] = {}
    for point in document["points"]:
        for plan in point["kinds"]:
            ratio = plan["step_ms"] / point["kinds"][0]["step_ms"]
            nearest[plan["kind"]] = min(ratio, nearest.get(plan["kind"], ratio))
    return sorted(nearest, key=lambda kind: nearest[kind])[:most]


def plan_of(point: dict[str, Any], kind: str | None) -> dict[str, Any] | None:
    """The plan of a kind at a point; None if it does not fit there."""
    return next((plan for plan in point["kinds"] if plan["kind"] == kind), None)


def crossing_sentences(document: Document) -> list[str]:
    """Each crossing as a sentence."""
    return [_sentence(document, crossing) for crossing in document["crossings"]]


def _sentence(document: Document, crossing: dict[str, Any]) -> str:
    start = f"From {value_of(document, crossing['value'])} on, {crossing['strategy']}"
    if crossing["why"] == "fits":
        return f"{start} is the fastest; {crossing['over']} does not run or fit."
    return f"{start} is faster than {crossing['over_strategy']}: its step takes {crossing['gain']:.0%} less time."


FIGURES = ("step", "all", "per device", "reserved\nGiB", "mfu")
FEW_FIGURES = ("step", "per device", "GiB")
"""Those that a narrow window has room for."""


def _best(document: Document) -> RenderableType:
    tables = FirstThatFits(_best_table(document, FIGURES), _best_table(document, FEW_FIGURES))
    bars = "in closed form: memory within 10%, time within 20%, in 3 of 4 cases"
    return Group(tables, Prose(bars, "dim"))


def _best_table(document: Document, figures: Sequence[str]) -> StrategyTable:
    unit = speed_unit(document)
    heads = [{"all": unit, "per device": f"{unit}\n/device"}.get(figure, figure) for figure in figures]
    title, left = (
        f"{document['job']} on {document['cluster']}",
        (swept_title(document).replace(" (", "\n("), "best strategy"),
    )
    table = strategy_table(title, left, heads, strategy="best strategy")
    for point in document["points"]:
        plan = plan_of(point, point["best_kind"])
        shown = f"{point['value']:,g}"
        if plan is None:
            table.add_row(shown, "nothing fits", *("-" for _ in figures))
            continue
        cells = {
            "step": step_time(plan["step_ms"]),
            "all": f"{speed_of(plan, per_device=False):,.0f}",
            "per device": f"{speed_of(plan, per_device=True):,.1f}",
            **dict.fromkeys(("reserved\nGiB", "GiB"), f"{plan['reserved_gib']:.1f}"),
            "mfu": f"{plan['mfu']:.0%}",
        }
        table.add_row(shown, Terms(plan["strategy"]), *(cells[figure] for figure in figures))
    return table


class KindTables:
    """A row for each kind, with its speed and memory at every point; several tables if the points are too many."""

    def __init__(self, document: Document, drawn: int) -> None:
        self._document = document
        self._kinds = drawn_kinds(document, drawn)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        points = self._document["points"]
        for number in range(1, len(points) + 1):
            size = ceil(len(points) / number)
            tables = [self._table(points[start : start + size]) for start in range(0, len(points), size)]
            if max(needed_width(table, console, options) for table in tables) <= options.max_width:
                break
        title = f"{speed_unit(self._document)} per device (reserved GiB) of the best plan of each kind"
        yield Text(title, style="italic")
        yield from tables

    def _table(self, points: Sequence[Document]) -> StrategyTable:
        table = strategy_table("", ("kind",), [f"{point['value']:,g}" for point in points], strategy="kind")
        for kind in self._kinds:
            cells = (_cell(plan_of(point, kind), is_best=kind == point["best_kind"]) for point in points)
            table.add_row(Terms(kind), *cells)
        return table


def _cell(plan: dict[str, Any] | None, *, is_best: bool) -> Text:
    if plan is None:
        return Text("-")
    shown = f"{show_count(speed_of(plan, per_device=True))} ({plan['reserved_gib']:.0f})"
    return Text(shown, style="bold" if is_best else "")


def _refused(document: Document) -> Prose:
    """Each named strategy that has no plan somewhere: where, and why."""
    groups: dict[tuple[str, str], list[str]] = {}
    for point in document["points"]:
        for refusal in point["refused"]:
            groups.setdefault((refusal["strategy"], refusal["reason"]), []).append(f"{point['value']:,g}")
    lines = [f"{strategy} at {'; '.join(values)}: {reason}" for (strategy, reason), values in groups.items()]
    count = sum(point["candidates"] for point in document["points"])
    return Prose("\n".join([*lines, f"{count:,} candidates in {document['seconds']:.1f} s"]))
