"""`meshwright layout`."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.term_help import with_terms

NOTES = with_terms(
    """Starts no process and needs no device. The JSON's `tensor_plan` can be edited and passed to
Job(tensor_plan=...), and the first modules of its stages to Job(stages=...)."""
)


def layout(
    job: Annotated[str, typer.Argument(help="A Python file with a variable `job`, or file.py:name.")],
    strategy: Annotated[str, typer.Option(help="The strategy to inspect, such as tp=2,pp=2:1f1b.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; default: as few as the strategy needs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Show how a strategy splits a job: layers, stages, what crosses stage boundaries, and the schedule.

    [bold]meshwright layout examples/gpt.py --strategy tp=2,pp=2:1f1b[/]

    [bold]meshwright layout examples/cnn.py --strategy op=2 --json[/]
    """
    from meshwright.commands.train import layout_command
    from meshwright.report.layout import layout_page

    document = layout_command(job=job, strategy=strategy, ranks=ranks)
    print_result(document, layout_page(document), as_json=as_json)
