"""The largest sizes that fit, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from meshwright.report.strategy_table import strategy_table
from meshwright.report.terms import Prose, Terms

ROWS = {"micro_batch": "micro-batch", "batch": "batch"}


def largest_page(document: dict[str, Any]) -> RenderableType:
    """A row for each size of each strategy, and below it why some have none."""
    numbers = ("samples", "reserved GiB", "next GiB")
    title = f"{document['job']} on {document['cluster']}"
    table = strategy_table(title, ("strategy", "largest"), numbers)
    for result in document["results"]:
        sizes = [(row, result[what], result["limits"][what]) for what, row in ROWS.items() if result["limits"][what]]
        for place, (row, size, limit) in enumerate(sizes or [("nothing", None, None)]):
            table.add_row("" if place else Terms(result["strategy"]), row, *_cells(size, limit))
        table.add_section()
    table.caption = "\n".join(_caption(document))
    shown = [table] if document["results"] else []
    return Group(*shown, *(Prose(line) for line in (*_reasons(document), *document["advice"])))


def _cells(size: int | None, limit: dict[str, Any] | None) -> tuple[str, ...]:
    """A size, and the memory that it and the next larger one need."""
    if size is None or limit is None:
        return ("-",) * 3
    held = f"{limit['reserved_gib']:.1f}{'*' if limit['grade'] == 'trace' else ''}"
    if limit["next"] is None:
        return f"{size:,} or more", held, "-"
    return f"{size:,}{'+' if limit['returns'] else ''}", held, f"{limit['next']['reserved_gib']:.1f}"


def _caption(document: dict[str, Any]) -> list[str]:
    limits = [limit for result in document["results"] for limit in result["limits"].values() if limit]
    lines = [f"a rank may reserve {document['room_gib']:.1f} GiB"]
    if not limits:
        return lines
    returning = [limit["returns"] for limit in limits]
    bars = " and ".join(f"{bar:.0%}" for bar in sorted({limit["error_bar"]["memory"] for limit in limits}))
    traced = any(limit["grade"] == "trace" for limit in limits)
    return [
        f"{'* traced on fake tensors; ' * traced}memory within {bars}, in 3 of 4 cases",
        "micro-batch: samples of one rank; any global batch fits by accumulating",
        "batch: samples of all ranks without accumulating",
        *(["+ runs, but the allocator returns memory in every step, which takes time"] * any(returning)),
        *lines,
    ]


def _reasons(document: dict[str, Any]) -> list[str]:
    found = [
        (result["strategy"], [*filter(None, [result["reason"]]), *result["notes"]]) for result in document["results"]
    ]
    return [f"{strategy}: {' '.join(sentences)}" for strategy, sentences in found if sentences]
