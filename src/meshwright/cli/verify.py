"""`meshwright verify`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.term_help import with_terms
from meshwright.importing import importing

NOTES = with_terms("Equal means: within rounding error of plain PyTorch. The JSON includes the bounds.")


def verify(
    job: Annotated[str, typer.Argument(help="A Python file with a variable `job`, or file.py:name.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes to start on this machine.")] = None,
    strategies: Annotated[
        list[str] | None, typer.Option(help="Strategies to verify, separated by spaces; default: all that fit.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed for weights and batches.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a rank waits for another before it fails.")] = 600,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Prove that strategies train like plain PyTorch in one process, or name the first difference.

    They are compared in float64 if the model supports it, so that rounding hides nothing.

    [bold]meshwright verify examples/gpt.py --ranks 4[/]

    [bold]meshwright verify examples/gpt.py --ranks 4 --strategies ddp zero1 fsdp,bf16 hsdp=2x2,ac=full --json[/]
    """
    with importing():
        from meshwright.commands.verify import verify_command
        from meshwright.report.tables import verdict_page
        from meshwright.runtime.request import VerifyRequest

    named = (*(strategies or ()), *(more or ()))
    document = verify_command(
        VerifyRequest(job=job, strategies=named, ranks=ranks, steps=steps, seed=seed, device=device, timeout=timeout)
    )
    if document is None:
        return
    print_result(document, verdict_page(document["results"]), as_json=as_json)
    different = [f"{one['strategy']} ({one['status']})" for one in document["results"] if not one["equal"]]
    if different:
        print(f"error: not equal to plain PyTorch: {', '.join(different)}", file=sys.stderr)
        raise typer.Exit(1)
