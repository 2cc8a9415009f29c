"""How a strategy splits a job, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.tables import make_table
from meshwright.units import show_bytes


def layout_page(document: dict[str, Any]) -> Group:
    mesh = " x ".join(f"{name} {size}" for name, size in document["mesh"].items()) or "one process"
    parts: list[RenderableType] = [Text(f"{document['strategy']} on {document['ranks']} ranks: {mesh}", style="bold")]
    if "tensor" in document:
        columns = ("module", "role", "divides", "why")
        parts.append(_table("tensor parallelism: how each layer is sharded", columns, document["tensor"]))
    if "operators" in document:
        columns = ("module", "kind", "divides", "why")
        parts.append(_table("operator-wise: how each operator is sharded", columns, document["operators"]))
    if "stages" in document:
        parts += [_stages(document["stages"]), *_schedule(document["schedule"])]
    return Group(*parts)


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    table = make_table(title, columns)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    return table


def _stages(stages: list[dict[str, Any]]) -> Table:
    table = make_table("stages", ("stage", "rank", "from", "to"), ("parameters", "computation", "receives"))
    for row in stages:
        received = ", ".join("x".join(map(str, tensor["shape"])) for tensor in row["receives"])
        table.add_row(
            *(str(row["stage"]), str(row["rank"]), row["first"], row["last"]),
            *(show_bytes(row["parameter_bytes"]), f"{row['flops_share']:.1%}", received or "the batch"),
        )
    table.caption = "parameters before tensor and data sharding; shapes of one micro-batch"
    return table


def _schedule(schedule: dict[str, Any]) -> list[RenderableType]:
    words = (
        f"{schedule['name']}, {schedule['micro_batches']} micro-batches: bubble {schedule['bubble']:.1%} "
        f"({schedule['bubble_if_balanced']:.1%} if stages were balanced), "
        f"micro-batches in flight per rank: {', '.join(map(str, schedule['in_flight']))}"
    )
    return [Text(words), Text(schedule["grid"], no_wrap=True, overflow="ellipsis")]
