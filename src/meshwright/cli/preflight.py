"""`meshwright preflight`."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.term_help import with_terms
from meshwright.importing import importing

NOTES = with_terms(
    """Starts no process and needs no device. `plan`, `verify` and `train` say the same about the strategies that
they use. Exit 1 if something is refused under the named strategy, or if the job cannot be trained at all."""
)


def preflight(
    job: Annotated[str, typer.Argument(help="A Python file with a `job`, preset:NAME, or hf:DIR with a config.")],
    strategy: Annotated[str | None, typer.Option(help="Only what matters under this strategy.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; default: as few as the strategy divides.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Find what in a job matters under parallel strategies: what, where, under which of them, and what to do.

    [bold]meshwright preflight examples/gpt.py[/]

    [bold]meshwright preflight job.py --strategy tp=2,pp=2:1f1b --ranks 8 --json[/]
    """
    with importing():
        from meshwright.commands.preflight import preflight_command
        from meshwright.errors import BadInput
        from meshwright.report.preflight import findings_page

    if ranks is not None and strategy is None:
        raise BadInput("--ranks needs the strategy that divides them; give it with --strategy.")
    document = preflight_command(job=job, strategy=strategy, ranks=ranks)
    print_result(document, findings_page(document), as_json=as_json)
    if document["failed"]:
        raise typer.Exit(1)
