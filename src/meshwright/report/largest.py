"""The largest sizes that fit, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.report.tables import Terms, make_table

NONE = "-"
COLUMNS = ("reserved GiB", "next GiB", "fails from")


def largest_page(document: dict[str, Any]) -> RenderableType:
    """A row for each strategy, and below it why some have none."""
    numbers = ("largest micro-batch", *COLUMNS, "largest batch without accumulating", *COLUMNS)
    table = make_table(f"{document['job']} on {document['cluster']}", ("strategy",), numbers)
    for result in document["results"]:
        limits = result["limits"]
        cells = (*_cells(result["micro_batch"], limits["micro_batch"]), *_cells(result["batch"], limits["batch"]))
        table.add_row(Terms(result["strategy"]), *cells)
    table.caption = "\n".join(_caption(document))
    shown = [table] if document["results"] else []
    return Group(*shown, *(Text(line) for line in (*_reasons(document), *document["advice"])))


def _cells(size: int | None, limit: dict[str, Any] | None) -> tuple[str, ...]:
    """A size with the memory that it and the next larger one need, for COLUMNS."""
    if size is None or limit is None:
        return (NONE,) * (1 + len(COLUMNS))
    traced = "*" if limit["grade"] == "trace" else ""
    if limit["next"] is None:
        return f"{size:,} or more", f"{limit['reserved_gib']:.1f}{traced}", NONE, NONE
    fails = size // limit["samples"] * limit["fails_from"]
    return f"{size:,}", f"{limit['reserved_gib']:.1f}{traced}", f"{limit['next']['reserved_gib']:.1f}", f"{fails:,}"


def _caption(document: dict[str, Any]) -> list[str]:
    limits = [limit for result in document["results"] for limit in result["limits"].values() if limit]
    lines = [f"{document['room_gib']:.1f} GiB of a device are available; a micro-batch is the samples of one rank"]
    if limits:
        bars = " and ".join(f"{bar:.0%}" for bar in sorted({limit["error_bar"]["memory"] for limit in limits}))
        traced = any(limit["grade"] == "trace" for limit in limits)
        lines.append(f"{'* traced on fake tensors; ' * traced}memory within {bars}, in 3 of 4 cases")
        lines.append("from the size in between to the one that fails, the allocator has to return memory")
    return lines


def _reasons(document: dict[str, Any]) -> list[str]:
    found = [
        (result["strategy"], [*filter(None, [result["reason"]]), *result["notes"]]) for result in document["results"]
    ]
    return [f"{strategy}: {' '.join(sentences)}" for strategy, sentences in found if sentences]
