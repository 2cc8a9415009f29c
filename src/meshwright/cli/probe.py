"""`meshwright probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result

NOTES = """Pass the file wherever a cluster is expected; its numbers replace the catalogue's.
Keep the machine idle meanwhile. Under torchrun on several nodes, the link between them is measured, too."""


def probe(
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes to start; 2 or more also measure links.")] = None,
    out: Annotated[Path | None, typer.Option(help="The cluster file to write, such as cluster.json.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Measure this machine: matrix products, memory, copies, kernel launches, and collectives by size.

    [bold]meshwright probe[/]

    [bold]meshwright probe --ranks 8 --out cluster.json[/]
    """
    from meshwright.probe.probe import probe_command
    from meshwright.report.probe import probe_page
    from meshwright.runtime.request import ProbeRequest

    document = probe_command(ProbeRequest(ranks=ranks, device=device, out=out))
    if document is not None:
        print_result(document, probe_page(document), as_json=as_json)
