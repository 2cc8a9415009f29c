"""The findings of a preflight for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
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


def _lines(finding: Finding, *, names: bool) -> list[Text]:
    heading = Text.assemble((finding.level, STYLES[finding.level]), f"  {finding.kind}")
    rows = {
        "what": finding.what,
        "where": ", ".join(filter(None, [finding.module, finding.place])),
        "under": ", ".join(finding.under) if names else "",
        "do": finding.do,
    }
    return [heading, *(Text(f"  {label:<6} {text}") for label, text in rows.items() if text)]
