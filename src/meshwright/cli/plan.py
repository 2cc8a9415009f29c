"""`meshwright plan`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.plan_modes import print_largest, print_sweep, refuse_together
from meshwright.cli.term_help import with_terms
from meshwright.importing import importing

if TYPE_CHECKING:
    from meshwright.exchange import Imported
    from meshwright.facts.kernel_table import KernelTable
    from meshwright.facts.plan import Ranking
    from meshwright.planner.calibrate import Calibration
    from meshwright.planner.search import PlanContext

NOTES = with_terms("Needs no GPU. Finalists are traced on fake tensors unless --fast. Exit 1 if nothing fits.")

LISTED, LARGEST_OF = 10, 4
"""Plans of a ranking, and strategies whose largest sizes are found unless they are named: each takes several traces."""


def plan(
    job: Annotated[str, typer.Argument(help="A Python file with a `job`, preset:NAME, or hf:DIR with a config.")],
    on: Annotated[str, typer.Option("--on", help="The cluster: 8xA100-40GB, 4x8xH100-80GB, local, or FILE.json.")],
    strategies: Annotated[list[str] | None, typer.Option(help="Consider only these, separated by spaces.")] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    precision: Annotated[str, typer.Option(help="Precisions to consider, comma-separated.")] = "bf16",
    ac: Annotated[str, typer.Option(help="Activation checkpointing to consider.")] = "none,selective,full",
    offload: Annotated[str, typer.Option(help="Offloading to consider.")] = "none,optimizer",
    compile: Annotated[bool, typer.Option("--compile", help="Also consider torch.compile.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Also consider CUDA graphs.")] = False,
    tensor: Annotated[bool, typer.Option(help="Consider tensor parallelism.")] = True,
    pipeline: Annotated[bool, typer.Option(help="Consider pipelines.")] = True,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch; default: the job's.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Plans to list; default: 10, and 4 with --largest.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Do not trace the finalists.")] = False,
    calibrate: Annotated[Path | None, typer.Option(help="Fit efficiencies to measured runs, as for validate.")] = None,
    kernels: Annotated[
        Path | None, typer.Option(help="Take kernels' times from a file that probe --kernels wrote on the device.")
    ] = None,
    time_host: Annotated[
        bool, typer.Option("--time-host", help="Time the model's own Python here, not a constant for each launch.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="A DeepSpeed, Accelerate or torchtitan config to rank against the plans.")
    ] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Find the largest micro-batch and batch that fit, instead of a ranking.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(help="Plan along devices=8..1024, batch=, sequence= or link= (GB/s between nodes); or a list."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts of memory and time or speed.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the first pipeline's timeline: FILE.html, or FILE.json for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Rank the strategies that fit, with memory and time by cause and the reasons.

    [bold]meshwright plan examples/gpt.py --on 8xA100-40GB[/]

    [bold]meshwright plan preset:llama3-70b --on 128x8xH100-80GB --fast --json[/]

    [bold]meshwright plan preset:llama3-8b --on 8xH100-80GB --strategies fsdp,bf16 tp=8,bf16[/]

    [bold]meshwright plan job.py --on 8xA100-40GB --against accelerate.yaml[/]

    [bold]meshwright plan job.py --on 4xA100-40GB --strategies pp=4:1f1b,bf16 --timeline timeline.html[/]

    [bold]meshwright plan preset:llama3.2-1b:seq=2048 --on 1xH200 --largest --strategies single,bf16[/]

    [bold]meshwright plan preset:llama3-8b --on 8xH100-80GB --sweep devices=8..1024 --html sweep.html[/]
    """
    with importing(briefly=True):
        from meshwright.api.job_planner import PlanOptions, open_planner, read_allowed, read_cluster
        from meshwright.api.kept_forecasts import keep_plans
        from meshwright.api.plan import rank
        from meshwright.api.sweep_range import SweepRange
        from meshwright.facts.strategy import Strategy
        from meshwright.report.charts import check_plotly
        from meshwright.report.plan import plan_page
        from meshwright.report.timeline import check_ending

    if largest:
        refuse_together("--largest", {"--html": html is not None, "--batch": batch is not None, "--sweep": bool(sweep)})
    if mode := "--largest" if largest else "--sweep" if sweep else "":
        refuse_together(mode, {"--timeline": timeline is not None, "--against": against is not None})
    swept = SweepRange.parse(sweep) if sweep is not None else None
    if timeline is not None:
        check_ending(timeline)
    if html is not None:
        check_plotly(f"--html {str(html)!r}")
    allowed = read_allowed(
        precision=precision,
        recompute=ac,
        offload=offload,
        compile=compile,
        graphs=graphs,
        tensor=tensor,
        pipeline=pipeline,
    )
    # Parsed and reprinted, so that mistakes are reported before the job is described.
    named = tuple(str(Strategy.parse(text)) for text in (*(strategies or ()), *(more or ())))
    fitted = _fit(calibrate) if calibrate else None
    options = PlanOptions(
        allowed=allowed,
        strategies=named,
        fast=fast,
        listed=top or (LARGEST_OF if largest else LISTED),
        global_batch=batch,
        calibration=fitted,
        kernels=_read_kernels(kernels, on) if kernels else (),
        time_host=time_host,
        against=_read(against, on) if against else None,
    )
    if largest:
        return print_largest(job, on, options, as_json=as_json)
    if swept is not None:
        return print_sweep(job, on, swept, options, html=html, as_json=as_json)
    cluster, started = read_cluster(on), time.perf_counter()
    planner = open_planner(job, options)
    ranking = rank(planner, cluster, options, name=job, started=started)
    keep_plans(ranking, cluster, global_batch=planner.global_batch)
    document = ranking.to_json()
    if html is not None or timeline is not None:
        _write(planner.context(cluster), ranking, html=html, timeline=timeline)
    print_result(document, plan_page(document), as_json=as_json)
    if not ranking.plans:
        raise typer.Exit(1)


def _write(context: PlanContext, ranking: Ranking, *, html: Path | None, timeline: Path | None) -> None:
    from meshwright.api.timeline import first_timeline
    from meshwright.errors import Refused
    from meshwright.report.plan_html import write_page
    from meshwright.report.timeline import write_timeline

    found = first_timeline(context, ranking.plans)
    if html is not None:
        write_page(ranking.to_json(), html, found)
    if timeline is not None and found is not None:
        write_timeline(found, timeline)
    elif timeline is not None and ranking.plans:
        raise Refused(
            f"--timeline {str(timeline)!r} needs a pipeline, but none of the {len(ranking.plans)} plans has one "
            "that can be drawn; name one with --strategies, such as pp=4:1f1b,bf16."
        )


def _read(file: Path, on: str) -> Imported:
    """Read another framework's config; the cluster gives the number of devices if the config leaves it open."""
    from meshwright.exchange import read_foreign
    from meshwright.facts.cluster import LOCAL, Cluster

    cluster = Cluster.parse(on)
    return read_foreign(file, ranks=None if cluster.device == LOCAL else cluster.devices)


def _read_kernels(file: Path, on: str) -> tuple[KernelTable, ...]:
    """The tables of a file, which must have one of the cluster's device."""
    from meshwright.api.job_planner import read_cluster
    from meshwright.facts.catalogue import hardware_of
    from meshwright.facts.kernel_table import read_tables, require_device

    tables = read_tables(file)
    require_device(tables, hardware_of(read_cluster(on)).device, str(file))
    return tables


def _fit(rows: Path) -> Calibration:
    from meshwright.api.validate import validate_rows
    from meshwright.planner.calibrate import calibrate

    return calibrate(validate_rows(rows))
