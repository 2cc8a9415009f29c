"""`meshwright validate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result

NOTES = """One row per run. Required columns: arch, n_layers, d_model, n_heads, d_ff, vocab, seq_len, gpu,
gpus_per_node, n_gpus, dp_replicate, dp_shard, zero_stage, tp, pp, micro_batch, grad_accum, status (`ok` or anything
else); measured values: tok_s_gpu and peak_mem_gib."""


def validate(
    rows: Annotated[Path, typer.Argument(help="A CSV file of measured runs of decoders.")],
    worst: Annotated[int, typer.Option(min=0, help="Number of worst forecasts to list.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Score the planner against measured runs: memory, time, which runs fit, and the cost of its first choice.

    [bold]meshwright validate runs.csv[/]

    [bold]meshwright validate runs.csv --json[/]
    """
    from rich.console import Console
    from rich.progress import Progress

    from meshwright.api.validate import validate_rows
    from meshwright.planner.scores import score
    from meshwright.report.validate import validate_page

    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("rows", total=None)
        outcomes = validate_rows(rows, lambda done, total: progress.update(task, completed=done, total=total))
    document = score(outcomes)
    print_result(document, validate_page(document, outcomes, worst), as_json=as_json)
