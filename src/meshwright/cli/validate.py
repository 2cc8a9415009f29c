"""`meshwright validate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result

NOTES = """One row per run. Required columns: arch, n_layers, d_model, n_heads, d_ff, vocab, seq_len, gpu,
gpus_per_node, n_gpus, dp_replicate, dp_shard, zero_stage, tp, pp, micro_batch, grad_accum, status (`ok` or anything
else); measured values: tok_s_gpu and peak_mem_gib. A link between nodes: inter_node_gbps, inter_node_link. A device's
own numbers: gpu_bf16_tflops, gpu_fp32_tflops, gpu_mem_gbs, gpu_mem_gib; a device that the catalogue does not have needs
all of them."""


def validate(
    rows: Annotated[Path, typer.Argument(help="A CSV file of measured runs of decoders.")],
    worst: Annotated[int, typer.Option(min=0, help="Number of worst forecasts to list.")] = 5,
    by: Annotated[
        str, typer.Option(help="Also score the rows with each value of this column, or by nodes or axes.")
    ] = "arch",
    csv: Annotated[Path | None, typer.Option(help="Write the forecast of every row to this file.")] = None,
    kernels: Annotated[
        Path | None, typer.Option(help="Forecast rows of the devices in this file with their measured kernels.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Score the planner against measured runs: memory, time, which runs fit, and the cost of its first choice.

    [bold]meshwright validate runs.csv[/]

    Rows that cannot be read or forecast are counted and named; exit 2 only if no row can be.

    [bold]meshwright validate runs.csv --json[/]

    [bold]meshwright validate runs.csv --by nodes --csv forecasts.csv[/]
    """
    from rich.console import Console
    from rich.progress import Progress

    from meshwright.api.validate import validate_table
    from meshwright.errors import BadInput, OutputError
    from meshwright.facts.kernel_table import read_tables
    from meshwright.planner.scores import score, score_groups
    from meshwright.report.validate import validate_page
    from meshwright.report.validate_csv import forecasts_csv

    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("rows", total=None)
        tables = read_tables(kernels) if kernels else ()
        found = validate_table(rows, lambda done, total: progress.update(task, completed=done, total=total), tables)
    outcomes, skipped = found.outcomes, found.skipped
    if not outcomes:
        raise BadInput(
            f"{rows} has no row to score" + (f"; {skipped[0].name}: {skipped[0].reason}." if skipped else ".")
        )
    if csv is not None:
        try:
            csv.write_text(forecasts_csv(outcomes, skipped))
        except OSError as error:
            raise OutputError(f"{csv} cannot be written: {error.strerror}.") from error
    named = [{"row": row.name, "reason": row.reason} for row in skipped]
    document = {**score(outcomes), "groups": {by: score_groups(outcomes, by)}, "skipped": named}
    print_result(document, validate_page(document, outcomes, worst), as_json=as_json)
