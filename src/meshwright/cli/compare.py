"""`meshwright compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.term_help import with_terms

NOTES = with_terms(
    """Each strategy runs in its own processes. One that fails, is killed, runs out of memory or times out gets a
row that says so. Exit 1 if every strategy failed."""
)


def compare(
    job: Annotated[str, typer.Argument(help="A Python file with a variable `job`, or file.py:name.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start on this machine for each strategy.")] = 2,
    strategies: Annotated[
        list[str] | None, typer.Option(help="Strategies to compare, separated by spaces; default: all basic ones.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="How many times each strategy is run.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Time limit in seconds for one round of one strategy.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Seed for weights and batches.")] = 0,
    on: Annotated[
        str, typer.Option("--on", help="Cluster to forecast for: local, or a FILE.json that probe wrote.")
    ] = "local",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with bars, curves, timelines and meshes.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write measured steps as trace events for Perfetto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Run strategies head to head: speed, memory, communication, bubble, losses, and forecasts next to measurements.

    [bold]meshwright compare examples/gpt.py --ranks 4[/]

    [bold]meshwright compare examples/gpt.py --ranks 2 --strategies ddp zero2 fsdp pp=2:1f1b --html compare.html[/]

    [bold]meshwright compare job.py --ranks 4 --steps 20 --rounds 3 --csv rows.csv --trace steps.json --json[/]
    """
    from meshwright.api.compare import compare_command
    from meshwright.compare.start import OK
    from meshwright.report.charts import check_plotly
    from meshwright.report.compare import check_folders, comparison_page, write_csv
    from meshwright.report.trace_events import write_trace
    from meshwright.runtime.request import CompareRequest

    request = CompareRequest(
        job=job,
        ranks=ranks,
        strategies=tuple([*(strategies or []), *(more or [])]),
        steps=steps,
        rounds=rounds,
        seed=seed,
        timeout=timeout,
        device=device,
    )
    check_folders(csv, html, trace)
    if html is not None:
        check_plotly(f"--html {str(html)!r}")
    comparison = compare_command(request, on=on)
    document = comparison.document
    if csv is not None:
        write_csv(document, csv)
    if html is not None:
        from meshwright.report.compare_html import write_page

        write_page(document, html)
    if trace is not None:
        write_trace(document, comparison.profiles, trace)
    print_result(document, comparison_page(document), as_json=as_json)
    if document["interrupted"]:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130)
    if not any(row["status"] == OK for row in document["results"]):
        print("error: every strategy failed; the table lists the reasons.", file=sys.stderr)
        raise typer.Exit(1)
