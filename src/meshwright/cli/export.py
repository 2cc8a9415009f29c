"""`meshwright export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.term_help import with_terms
from meshwright.errors import BadInput, Unreadable
from meshwright.reading import Limits, read_json, shown
from meshwright.units import MIB

if TYPE_CHECKING:
    from meshwright.exchange import ExportRequest
    from meshwright.facts.cluster import Cluster
    from meshwright.facts.strategy import Strategy

NOTES = with_terms(
    """Settings that the target cannot express are listed on stderr, in the file's comments and in the JSON. To read
such a config, use plan --against FILE."""
)
LAUNCHERS = ("slurm", "kubernetes", "ray", "kuberay")
"""Targets that need only the job's name, not its content."""
PLAN = Limits(bytes=64 * MIB, values=5_000_000)


def export(
    what: Annotated[str, typer.Argument(metavar="STRATEGY|PLAN", help="A strategy, or a file from plan --json.")],
    to: Annotated[
        str, typer.Option(help="accelerate, deepspeed, torchtitan, megatron, slurm, kubernetes, ray, kuberay.")
    ],
    job: Annotated[str | None, typer.Option(help="The job, for its batch and clipping, or to launch it.")] = None,
    on: Annotated[str | None, typer.Option("--on", help="The cluster, as for plan; default: the plan's.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Devices on one node, instead of --on.")] = None,
    pick: Annotated[str | None, typer.Option(help="Which plan of the file: its number or its strategy.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch; default: the job's.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; default: stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Write a strategy as another framework's config, or as a launch file.

    [bold]meshwright export hsdp=2x4,bf16,ac=full --to accelerate --out accelerate.yaml[/]

    [bold]meshwright export plan.json --to deepspeed --pick 2[/]

    [bold]meshwright export fsdp=8,tp=2,bf16 --to slurm --job job.py --on 2x8xH100-80GB --out train.sbatch[/]
    """
    from meshwright.exchange import export as exported

    found = exported(_request(what, to, job=job, on=on, ranks=ranks, pick=pick, batch=batch), to)
    document = found.to_json() | {"file": None if out is None else str(out)}
    if out is not None:
        from meshwright.report.html import write_file

        write_file(found.text, out, what="export")
    if as_json:
        print_result(document, "", as_json=True)
        return
    for loss in found.without_equal:
        print(f"not expressible: {loss}", file=sys.stderr)
    print(found.text if out is None else f"{found.strategy} -> {out}", end="" if out is None else "\n")


def _request(
    what: str, to: str, *, job: str | None, on: str | None, ranks: int | None, pick: str | None, batch: int | None
) -> ExportRequest:
    """The export request, from the arguments and, where they are missing, from the plan."""
    from meshwright.exchange import ExportRequest
    from meshwright.facts.strategy import Strategy

    plan = _read_plan(Path(what)) if what.endswith(".json") else {}
    if pick is not None and not plan:
        raise BadInput(f"--pick {pick} chooses a plan from a file, but {what!r} is a strategy; leave it out.")
    strategy = Strategy.parse(_picked(plan, pick) if plan else what)
    cluster = _cluster(strategy, on or (None if ranks else plan.get("cluster")), ranks)
    job = job or plan.get("job")
    loaded = None
    if job is not None and to not in LAUNCHERS:
        from meshwright.jobs.load import load_job

        loaded = load_job(job)
    return ExportRequest(
        strategy=strategy.resolve(cluster.devices),
        ranks=cluster.devices,
        nodes=cluster.nodes,
        device="cpu" if cluster.device == "cpu" else "cuda",
        job=job or "",
        global_batch=batch or (loaded.global_batch if loaded else None),
        max_norm=loaded.max_norm if loaded else None,
    )


def _cluster(strategy: Strategy, on: str | None, ranks: int | None) -> Cluster:
    """The named machines; by default one node with as many devices as the strategy's sizes need."""
    from meshwright.facts.cluster import LOCAL, Cluster

    if on is not None and ranks is not None:
        raise BadInput(f"--on {on} and --ranks {ranks} both set the number of devices; give only one of them.")
    if on is not None:
        cluster = Cluster.parse(on)
        if cluster.device != LOCAL:
            return cluster
        from meshwright.probe.machine import local_cluster

        return local_cluster()
    named = strategy.data is not None or strategy.model_ranks == 1
    if ranks is None and named and strategy.data_size is None and not strategy.traits.alone:
        raise BadInput(f"{strategy} does not set the number of ranks; give --on or --ranks.")
    return Cluster(devices_per_node=ranks or strategy.model_ranks * (strategy.data_size or 1), device="GPU")


def _read_plan(path: Path) -> dict[str, Any]:
    """Read a document that `plan --json` wrote."""
    try:
        document = read_json(path, PLAN)
    except Unreadable as error:
        raise BadInput(f"Cannot read the plan {str(path)!r}: {error.why}. Write one with plan --json.") from None
    if not isinstance(document, dict) or not isinstance(document.get("plans"), list):
        raise BadInput(f"{path} is not a plan; write one with plan --json, or name a strategy.")
    if not document["plans"]:
        raise BadInput(f"{path} holds no plan, because nothing fits; see its advice.")
    for entry in document["plans"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("strategy"), str):
            raise BadInput(f"{path} holds a plan without a strategy, {shown(entry)}; write one with plan --json.")
    for name in ("cluster", "job"):
        if not isinstance(document.get(name, ""), str | None):
            raise BadInput(f"{path}: its {name} is {shown(document[name])}, which is not text; write the plan again.")
    return document


def _picked(plan: dict[str, Any], pick: str | None) -> str:
    """The strategy of the first plan, or of the plan with this number or strategy."""
    strategies = [entry["strategy"] for entry in plan["plans"]]
    if pick is None:
        return str(strategies[0])
    if pick.isdecimal() and len(pick) < 10 and 0 < int(pick) <= len(strategies):
        return str(strategies[int(pick) - 1])
    if pick in strategies:
        return pick
    raise BadInput(
        f"--pick {pick!r} is not a plan in the file; give a number from 1 to {len(strategies)}, or one of "
        f"{', '.join(strategies[:3])}."
    )
