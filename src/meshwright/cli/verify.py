"""`meshwright verify`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.importing import importing

NOTES = """Equal means: no further from one process than rounding takes it. The bounds are part of the JSON."""


def verify(
    job: Annotated[str, typer.Argument(help="A Python file with a variable `job`, or file.py:name.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes to start on this machine.")] = None,
    strategies: Annotated[
        list[str] | None, typer.Option(help="Strategies to verify, one or more words; all that fit if left out.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    seed: Annotated[int, typer.Option(help="For weights and batches.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU is taken where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Prove that strategies train as one process does, or name the first thing that differs.

    [bold]meshwright verify examples/gpt.py --ranks 4[/]

    [bold]meshwright verify examples/gpt.py --ranks 4 --strategies ddp zero1 fsdp,bf16 hsdp=2x2,ac=full --json[/]
    """
    with importing():
        from meshwright.report.tables import verdict_table
        from meshwright.runtime.command import verify_command

    asked = [*(strategies or []), *(more or [])]
    document = verify_command(job=job, strategies=asked, ranks=ranks, steps=steps, seed=seed, device=device)
    if document is None:
        return
    print_result(document, verdict_table(document["results"]), as_json=as_json)
    different = [result["strategy"] for result in document["results"] if not result["equal"]]
    if different:
        print(f"error: not equal to one process: {', '.join(different)}", file=sys.stderr)
        raise typer.Exit(1)
