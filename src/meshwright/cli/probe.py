"""`meshwright probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.outcome import print_result
from meshwright.errors import BadInput

NOTES = """Pass the file wherever a cluster is expected; its numbers replace the catalogue's.
With --kernels, `plan --kernels FILE` forecasts with what was measured; operators that the file has are not timed again.
Keep the machine idle meanwhile. Under torchrun on several nodes, the link between them is measured, too."""


def probe(
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes to start; 2 or more also measure links.")] = None,
    out: Annotated[Path | None, typer.Option(help="The cluster file to write, such as cluster.json.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU.")] = None,
    kernels: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="Time the operators of this job's step instead; --out is a file of kernels."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="With --kernels: a strategy whose step is traced; may be repeated. Default: single."),
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="With --kernels: ranks of the traced world.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --kernels: global batch; default: the job's.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="With --kernels: the longest that all kernels may take; default: 600.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Measure this machine: matrix products, memory, copies, kernel launches, and collectives by size.

    [bold]meshwright probe[/]

    [bold]meshwright probe --ranks 8 --out cluster.json[/]

    [bold]meshwright probe --kernels job.py --strategy single,bf16 --out kernels.json[/]
    """
    if kernels is not None:
        if ranks is not None:
            raise BadInput("--kernels runs in this process alone; leave --ranks out, and give --world for more ranks.")
        return _kernels(kernels, strategy or [], world or 1, batch, seconds, device, out, as_json=as_json)
    for option, value in {"--strategy": strategy, "--world": world, "--batch": batch, "--seconds": seconds}.items():
        if value:
            raise BadInput(f"{option} belongs to --kernels JOB, which was not given.")
    from meshwright.probe.probe import probe_command
    from meshwright.report.probe import probe_page
    from meshwright.runtime.request import ProbeRequest

    document = probe_command(ProbeRequest(ranks=ranks, device=device, out=out))
    if document is not None:
        print_result(document, probe_page(document), as_json=as_json)


def _kernels(
    job: str,
    strategies: list[str],
    world: int,
    batch: int | None,
    seconds: float | None,
    device: str | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    from meshwright.api.probe_kernels import OUT, KernelRequest, probe_kernels
    from meshwright.probe.measure_kernels import SECONDS
    from meshwright.report.probe import kernels_page

    request = KernelRequest(
        job=job,
        strategies=tuple(strategies),
        world=world,
        device=device,
        out=out or OUT,
        batch=batch,
        seconds=seconds or SECONDS,
    )
    document = probe_kernels(request)
    print_result(document, kernels_page(document), as_json=as_json)
