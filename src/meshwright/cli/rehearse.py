"""`meshwright rehearse`."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.plan_modes import refuse_together
from meshwright.cli.term_help import with_terms
from meshwright.errors import BadInput
from meshwright.importing import importing

NOTES = with_terms(
    """Each rehearsal runs in a separate process, with the code that training runs. Exit 1 if it does not fit or
fails. On a CPU, memory is that of all storages; --memory limits it, so that running out can be tried without a GPU."""
)


def rehearse(
    job: Annotated[str, typer.Argument(help="A Python file with a `job`, preset:NAME, or hf:DIR with a config.")],
    strategy: Annotated[
        str | None, typer.Option(help="The strategy, such as fsdp,bf16; --tune can do without it.")
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks of the fake world.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="The rank to rehearse; default: 0.")] = None,
    all_roles: Annotated[
        bool, typer.Option("--all-roles", help="Rehearse a rank of each stage, and ranks that hold less.")
    ] = False,
    on: Annotated[
        str | None, typer.Option("--on", help="The cluster: its links give the communication, its devices the limit.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory that a rank may use, such as 40GiB.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch; default: the job's.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Find the fastest micro-batch, recompute and strategy that fit.")
    ] = False,
    trials: Annotated[int | None, typer.Option(min=1, help="With --tune: the most rehearsals.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="With --tune: no rehearsal begins after this time.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="With --tune and no --strategy; default: bf16, CPU: fp32.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a rehearsal; the median counts.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one rehearsal may take.")] = 600.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU.")] = None,
    kernels: Annotated[
        Path | None, typer.Option(help="Forecast with kernels that probe --kernels measured on this device.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with the comparison: FILE.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Take one rank's real steps in a fake world: does it fit, how fast does it compute, and was the forecast right?

    [bold]meshwright rehearse preset:llama3-8b --strategy fsdp,bf16,ac=selective --world 64[/]

    [bold]meshwright rehearse job.py --strategy pp=4:1f1b,fsdp --world 16 --all-roles --on 2x8xH100-80GB[/]

    [bold]meshwright rehearse examples/gpt.py --strategy ddp --world 4 --memory 20MiB[/]

    [bold]meshwright rehearse job.py --tune --world 8 --memory 40GiB[/]
    """
    with importing():
        from meshwright.api.rehearsal_site import find_site
        from meshwright.api.rehearser import open_rehearser
        from meshwright.facts.kernel_table import read_tables
        from meshwright.facts.strategy import Strategy

    if page is not None and page.suffix != ".html":
        raise BadInput(f"--page {str(page)!r} must end in .html.")
    if rank is not None and all_roles:
        raise BadInput("--rank and --all-roles both say which ranks to rehearse; give one of them.")
    if strategy is not None:
        Strategy.parse(strategy)  # a mistake is reported before the job is described
    if tune:
        refuse_together("--tune", {"--rank": rank is not None, "--all-roles": all_roles})
    elif strategy is None:
        raise BadInput("A rehearsal needs a strategy; give --strategy, or --tune to find one.")
    elif any(option is not None for option in (trials, minutes, precision)):
        raise BadInput("--trials, --minutes and --precision belong to --tune; leave them out.")
    site = find_site(world=world, on=on, device=device, memory=memory)
    tables = read_tables(kernels) if kernels else ()
    rehearser = open_rehearser(job, site, batch=batch, timeout=timeout, tell=_tell, steps=steps, kernels=tables)
    if tune:
        document = _tune(rehearser, strategy, precision, trials, minutes)
    else:
        document = _rehearse(rehearser, strategy or "", rank, all_roles)
    _finish(document, page, as_json=as_json, tuned=tune)


def _rehearse(rehearser: Any, strategy: str, rank: int | None, all_roles: bool) -> dict[str, Any]:
    from meshwright.api.kept_forecasts import keep_rehearsal
    from meshwright.api.rehearse import rehearse_strategy

    document = rehearse_strategy(rehearser, strategy, rank=rank, all_roles=all_roles)
    keep_rehearsal(document)
    return document


def _tune(
    rehearser: Any, strategy: str | None, precision: str | None, trials: int | None, minutes: float | None
) -> dict[str, Any]:
    from meshwright.api.tune import TuneOptions, tune
    from meshwright.planner.candidates import Allowed

    if strategy is not None and precision is not None:
        raise BadInput(f"{strategy} names its precision; leave --precision out.")
    rehearser.traced = False  # each trial is measured anyway
    default = "fp32" if rehearser.site.device == "cpu" else "bf16"
    allowed = Allowed(precisions=(precision or default,))
    seconds = inf if minutes is None else 60 * minutes
    return tune(rehearser, TuneOptions(allowed=allowed, strategy=strategy, trials=trials, seconds=seconds))


def _finish(document: dict[str, Any], page: Path | None, *, as_json: bool, tuned: bool) -> None:
    from meshwright.report.rehearse import rehearsal_page, tuning_page

    if page is not None:
        from meshwright.report.rehearse_html import write_rehearsal

        write_rehearsal(document, page)
    print_result(document, (tuning_page if tuned else rehearsal_page)(document), as_json=as_json)
    if document["strategy"] is None if tuned else not document["fits"]:
        raise typer.Exit(1)


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
