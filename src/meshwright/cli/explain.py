"""`meshwright explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.term_help import with_terms
from meshwright.importing import importing

NOTES = with_terms(
    """Starts no process and needs no GPU: the code that training runs is traced on fake tensors. Bytes are those of
the trace; times are the planner's for the cluster."""
)


def explain(
    strategy: Annotated[str, typer.Argument(help="The strategy to explain, such as fsdp or tp=2,pp=2:1f1b.")],
    job: Annotated[str, typer.Option(help="A Python file with a `job`, preset:NAME, or hf:DIR with a config.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; default: as few as the strategy divides.")] = None,
    on: Annotated[
        str | None, typer.Option("--on", help="The cluster, such as 2x8xA100-40GB; default: as many H100 as ranks.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with pictures: FILE.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Walk through one step of a job under a strategy: what is gathered, computed, sent and freed, where and when.

    [bold]meshwright explain fsdp --job examples/gpt.py[/]

    [bold]meshwright explain tp=2,pp=2:1f1b --job examples/gpt.py --on 4xA100-40GB --page step.html[/]
    """
    with importing():
        from meshwright.api.explain import explain_job
        from meshwright.errors import BadInput
        from meshwright.report.explain import explain_page

    if page is not None and page.suffix != ".html":
        raise BadInput(f"--page {str(page)!r} must end in .html.")
    if ranks is not None and on is not None:
        raise BadInput("--ranks and --on both say how many ranks there are; give one of them.")
    document = explain_job(job, strategy, ranks=ranks, on=on)
    if page is not None:
        from meshwright.report.explain_html import write_explanation

        write_explanation(document, page)
    print_result(document, explain_page(document), as_json=as_json)
