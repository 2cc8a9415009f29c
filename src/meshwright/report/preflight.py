"""The findings of a preflight for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from meshwright.facts.finding import Finding
from meshwright.report.terms import Prose

STYLES = {"refused": "bold red", "warning": "bold yellow", "note": "bold"}


def findings_page(document: dict[str, Any]) -> Group:
    strategy = document["strategy"]
    under = f"under {strategy} on {document['ranks']} ranks" if strategy else "under any strategy"
    found = [Finding.from_json(one) for one in document["findings"]]
    if not found:
        return Group(Prose(f"Nothing in {document['job']} needs attention {under}."))
    parts: list[RenderableType] = [Prose("", lead=f"{document['job']} {under}")]
    for one in found:
        parts += [Text(), *_lines(one, names=not strategy)]
    return Group(*parts)


def _lines(finding: Finding, *, names: bool) -> list[RenderableType]:
    """The finding's kind, and below it a row for each thing to say, with the wrapped text indented."""
    heading = Text.assemble((finding.level, STYLES[finding.level]), f"  {finding.kind}")
    rows = {
        "what": finding.what,
        "where": ", ".join(filter(None, [finding.module, finding.place])),
        "under": ", ".join(finding.under) if names else "",
        "do": finding.do,
    }
    table = Table.grid(Column(width=8), Column(overflow="fold"), padding=(0, 1, 0, 0))
    for label, text in rows.items():
        if text:
            table.add_row(Text(f"  {label}"), Text(text))
    return [heading, table]
