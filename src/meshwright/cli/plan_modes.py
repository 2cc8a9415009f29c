"""The other questions of `meshwright plan`: `--largest` and `--sweep`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli.outcome import print_result
from meshwright.errors import BadInput

if TYPE_CHECKING:
    from meshwright.api.job_planner import PlanOptions
    from meshwright.api.sweep_range import SweepRange


def refuse_together(mode: str, others: dict[str, bool]) -> None:
    """Raise if an option is given that a mode has no use for."""
    for option, is_given in others.items():
        if is_given:
            raise BadInput(f"{mode} cannot be combined with {option}; leave one of them out.")


def print_largest(job: str, on: str, options: PlanOptions, *, as_json: bool) -> None:
    """`plan --largest`."""
    from meshwright.api.job_planner import open_planner, read_cluster
    from meshwright.api.largest import check_named, find_largest
    from meshwright.report.largest import largest_page

    check_named(options.strategies)
    cluster, started = read_cluster(on), time.perf_counter()
    planner = open_planner(job, options)
    document = find_largest(planner, cluster, options, name=job, started=started, tell=_tell).to_json()
    print_result(document, largest_page(document), as_json=as_json)
    if not any(result["fits"] for result in document["results"]):
        raise typer.Exit(1)


def print_sweep(
    job: str, on: str, swept: SweepRange, options: PlanOptions, *, html: Path | None, as_json: bool
) -> None:
    """`plan --sweep`."""
    from meshwright.api.job_planner import read_cluster
    from meshwright.api.sweep import sweep
    from meshwright.report.sweep import sweep_page
    from meshwright.report.sweep_html import write_page

    document = sweep(job, read_cluster(on), swept, options, tell=_tell).to_json()
    if html is not None:
        write_page(document, html)
    print_result(document, sweep_page(document), as_json=as_json)
    if not any(point["kinds"] for point in document["points"]):
        raise typer.Exit(1)


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
