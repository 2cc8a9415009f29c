"""The output of `probe`, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.tables import make_list, make_table
from meshwright.units import show_bytes, show_seconds

UNMEASURED, LONGEST = 5, 90
"""Operators without a measurement that are listed, and characters of one that are shown."""


def probe_page(document: dict[str, Any]) -> Group:
    ranks = f"{document['ranks']} rank{'s' * (document['ranks'] > 1)}"
    title = f"{document['machine']}, {ranks}, torch {document['torch']}: {document['seconds']:.0f} s"
    parts: list[RenderableType] = [Text(title, style="bold"), _device(document), _matmuls(document["matmul"])]
    if document["collectives"]:
        parts += [_collectives(document["collectives"]), _links(document["links"])]
    return Group(*parts)


def kernels_page(document: dict[str, Any]) -> Group:
    """The output of `probe --kernels`."""
    counts = f"{document['operators']} operators: {document['measured']} measured, {document['known']} known before"
    failed = document["failed"]
    title = f"{document['machine']}, torch {document['torch']}: {document['seconds']:.0f} s"
    table = make_table("kernels that take most of the step", ("operator",), ("ms", "times"))
    for row in document["longest"]:
        table.add_row(_short(row["operator"]), f"{row['ms']:.3g}", str(row["count"]))
    parts: list[RenderableType] = [Text(title, style="bold"), Text(f"{counts}, {len(failed)} not measured"), table]
    parts += [Text(f"not measured: {_short(row['operator'])}: {row['reason']}") for row in failed[:UNMEASURED]]
    if len(failed) > UNMEASURED:
        parts.append(Text(f"... and {len(failed) - UNMEASURED} more; --json has all"))
    return Group(*parts, Text(f"Written to {document['out']}. Use it with plan --kernels {document['out']}."))


def _short(signature: str) -> str:
    return signature if len(signature) <= LONGEST else f"{signature[: LONGEST - 3]}..."


def _device(document: dict[str, Any]) -> Table:
    table = make_list("device")
    table.add_row("memory bandwidth", _speed(document["bandwidth"]))
    table.add_row("kernel launch", show_seconds(document["launch"]))
    for key, value in (document["host"] or {}).items():
        name = {"to_device": "host to device", "to_host": "device to host", "latency": "copy latency"}[key]
        table.add_row(name, show_seconds(value) if key == "latency" else _speed(value))
    return table


def _matmuls(rows: list[dict[str, Any]]) -> Table:
    table = make_table("matrix products", ("dtype", "m x n x k"), ("TFLOP/s",))
    for row in rows:
        table.add_row(row["dtype"], " x ".join(map(str, row["shape"])), f"{row['flops'] / 1e12:.3g}")
    return table


def _collectives(rows: list[dict[str, Any]]) -> Table:
    """One row per kind and layout, one column per size: time and bus bandwidth."""
    sizes = sorted({row["bytes"] for row in rows})
    title = "collectives: time, and bus bandwidth of a ring"
    table = make_table(title, ("collective", "ranks"), [show_bytes(size) for size in sizes])
    cells = {(row["layout"], row["kind"], row["bytes"]): row for row in rows}
    for layout, kind in dict.fromkeys((row["layout"], row["kind"]) for row in rows):
        found = [cells.get((layout, kind, size)) for size in sizes]
        words = [f"{show_seconds(row['seconds'])}\n{_speed(row['bus'])}" if row else "" for row in found]
        table.add_row(kind, layout, *words)
    return table


def _links(links: dict[str, dict[str, float]]) -> Table:
    table = make_table("links, fitted to ring collectives", ("link",), ("bandwidth", "latency", "median error"))
    for name, link in links.items():
        place = {"within": "within a node", "between": "between nodes"}[name]
        table.add_row(place, _speed(link["bandwidth"]), show_seconds(link["latency"]), f"{link['error']:.0%}")
    return table


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
