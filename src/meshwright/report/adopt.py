"""A script's mistakes, and the job that was written from it, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.tables import make_table


def adopt_page(document: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [Text(f"{document['script']}: {document['kind']}", style="bold")]
    parts.append(_findings(document["findings"]) if document["findings"] else Text("No mistakes found."))
    if document["todo"]:
        parts.append(Text("Left to do in the job:", style="bold"))
        parts += [Text(f"  {number}. {one}") for number, one in enumerate(document["todo"], 1)]
    if document["notes"]:
        parts.append(Text("To know:", style="bold"))
        parts += [Text(f"  - {one}") for one in document["notes"]]
    parts.append(_next(document))
    return Group(*parts)


def _findings(findings: list[dict[str, Any]]) -> Table:
    table = make_table("", ("line", "what"), ())
    table.add_column("why, and what to do")
    for one in findings:
        table.add_row(str(one["line"]), f"{one['name']} ({one['grade']})", one["message"])
    return table


def _next(document: dict[str, Any]) -> Text:
    file = document["file"]
    if file is None:
        return Text("Write the job with -o job.py.")
    if document["todo"]:
        return Text(f"{file} is written; fill in what is listed, then: meshwright verify {file} --ranks 2")
    return Text(f"{file} is written. Next: meshwright verify {file} --ranks 2")
