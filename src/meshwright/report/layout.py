"""How a strategy splits a job, for the terminal."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.tables import make_table
from meshwright.report.terms import Prose
from meshwright.units import show_bytes, show_count


def layout_page(document: dict[str, Any]) -> Group:
    mesh = " x ".join(f"{name} {size}" for name, size in document["mesh"].items()) or "one process"
    parts: list[RenderableType] = [Prose("", lead=f"{document['strategy']} on {document['ranks']} ranks: {mesh}")]
    if "units" in document:
        parts.append(_units(document["units"]))
    if "float8" in document:
        parts.append(_float8(document["float8"]))
    if "head" in document:
        parts.append(Text(_head(document["head"])))
    if "tensor" in document:
        columns = ("module", "role", "divides", "why")
        parts.append(_table("tensor parallelism: how each layer is sharded", columns, document["tensor"]))
    if "tokens" in document:
        parts.append(Text(_tokens(document["tokens"])))
    if "operators" in document:
        columns = ("module", "kind", "divides", "why")
        parts.append(_table("operator-wise: how each operator is sharded", columns, document["operators"]))
    if "stages" in document:
        parts += [_stages(document["stages"]), *_schedule(document["schedule"])]
    return Group(*parts)


def _head(head: dict[str, Any]) -> str:
    found = f"loss=pieced: {head['module'] or 'the model'} ({head['classes']} classes) and its loss run in pieces"
    needed = ", ".join(head["needed_by"])
    return f"{found}; but all logits are computed too, for {needed}" if needed else found


def _tokens(tokens: dict[str, Any]) -> str:
    shares = ", ".join(f"{number // tokens['ranks']:,} of {number:,}" for number in tokens["all"])
    where = "from both ends, for causal masks" if tokens["chunks"] > 1 else "in one chunk"
    return f"context parallelism: a rank has {shares} tokens of a sample, {where}; keys and values are gathered"


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    table = make_table(title, columns)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    return table


def _float8(names: list[str]) -> Text:
    """The layers that multiply in float8; those of like blocks in one word."""
    words = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    if not words:
        return Text("float8: no layer is large enough, and all multiply in bf16")
    return Text(f"float8: {len(names)} layers multiply in it ({', '.join(words)}); all others in bf16")


def _units(units: list[dict[str, Any]]) -> Table:
    """One row for consecutive units of the same size, as a model's blocks are."""
    table = make_table("units: what is gathered and reduced together", ("unit",), ("parameters", "gathered", "kept"))
    for _, group in groupby(units, key=lambda row: (row["gathered_bytes"], row["kept_bytes"])):
        alike = list(group)
        names = [row["unit"] for row in alike]
        name = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} units)"
        size = alike[0]
        table.add_row(
            name, show_count(size["parameters"]), show_bytes(size["gathered_bytes"]), show_bytes(size["kept_bytes"])
        )
    table.caption = "each: gathered in the dtype of the computation; kept by one rank between steps, before other axes"
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
