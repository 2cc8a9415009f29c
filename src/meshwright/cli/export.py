"""`meshwright export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.outcome import print_result
from meshwright.errors import BadInput, OutputError, Unreadable, one_line
from meshwright.reading import Limits, read_json, shown
from meshwright.units import MIB

if TYPE_CHECKING:
    from meshwright.exchange import Subject
    from meshwright.facts.cluster import Cluster
    from meshwright.facts.strategy import Strategy

NOTES = """What has no equal in the other's language is named on stderr, in the file's comments and in the JSON. The way
back is plan --against FILE."""
LAUNCHERS = ("slurm", "kubernetes")
"""Files that name the job and do not look into it."""
PLAN = Limits(bytes=64 * MIB, values=5_000_000)


def export(
    what: Annotated[str, typer.Argument(metavar="STRATEGY|PLAN", help="A strategy's text, or plan --json's file.")],
    to: Annotated[str, typer.Option(help="accelerate, deepspeed, torchtitan, slurm or kubernetes.")],
    job: Annotated[str | None, typer.Option(help="The job, for its batch and clipping, or to launch it.")] = None,
    on: Annotated[str | None, typer.Option("--on", help="The cluster, as plan takes it; else the plan's.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Devices of one node, instead of a cluster.")] = None,
    pick: Annotated[str | None, typer.Option(help="Which of the plans: its number, or its strategy's text.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch, instead of the job's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; stdout if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Write a strategy as somebody else's config, or as a launch file.

    [bold]meshwright export hsdp=2x4,bf16,ac=full --to accelerate --out accelerate.yaml[/]

    [bold]meshwright export plan.json --to deepspeed --pick 2[/]

    [bold]meshwright export fsdp=8,tp=2,bf16 --to slurm --job job.py --on 2x8xH100-80GB --out train.sbatch[/]
    """
    from meshwright.exchange import export as exported

    found = exported(_subject(what, to, job=job, on=on, ranks=ranks, pick=pick, batch=batch), to)
    document = found.to_json() | {"file": None if out is None else str(out)}
    if out is not None:
        _write(found.text, out)
    if as_json:
        print_result(document, "", as_json=True)
        return
    for loss in found.without_equal:
        print(f"without equal: {loss}", file=sys.stderr)
    print(found.text if out is None else f"{found.strategy} -> {out}", end="" if out is None else "\n")


def _subject(
    what: str, to: str, *, job: str | None, on: str | None, ranks: int | None, pick: str | None, batch: int | None
) -> Subject:
    """What is exported, put together from the arguments and, where they are silent, from the plan."""
    from meshwright.exchange import Subject
    from meshwright.facts.strategy import Strategy

    plan = _read_plan(Path(what)) if what.endswith(".json") else {}
    if pick is not None and not plan:
        raise BadInput(f"--pick {pick} chooses among a file's plans, but {what!r} is a strategy's text; leave it out.")
    strategy = Strategy.parse(_picked(plan, pick) if plan else what)
    cluster = _cluster(strategy, on or (None if ranks else plan.get("cluster")), ranks)
    job = job or plan.get("job")
    loaded = None
    if job is not None and to not in LAUNCHERS:
        from meshwright.describe.jobfile import load_job

        loaded = load_job(job)
    return Subject(
        strategy=strategy.resolve(cluster.devices),
        ranks=cluster.devices,
        nodes=cluster.nodes,
        device="cpu" if cluster.device == "cpu" else "cuda",
        job=job or "",
        global_batch=batch or (loaded.global_batch if loaded else None),
        max_norm=loaded.max_norm if loaded else None,
    )


def _cluster(strategy: Strategy, on: str | None, ranks: int | None) -> Cluster:
    """The machines that were named; else as many devices of one node as the strategy's sizes make."""
    from meshwright.facts.cluster import LOCAL, Cluster

    if on is not None and ranks is not None:
        raise BadInput(f"--on {on} and --ranks {ranks} both say how many devices there are; give one of them.")
    if on is not None:
        cluster = Cluster.parse(on)
        if cluster.device != LOCAL:
            return cluster
        from meshwright.runtime.probe_machine import local_cluster

        return local_cluster()
    named = strategy.data is not None or strategy.model_ranks == 1
    if ranks is None and named and strategy.data_size is None and not strategy.traits.alone:
        raise BadInput(f"{strategy} does not say on how many ranks; give --on or --ranks.")
    return Cluster(devices_per_node=ranks or strategy.model_ranks * (strategy.data_size or 1), device="GPU")


def _read_plan(path: Path) -> dict[str, Any]:
    """What `plan --json` wrote."""
    try:
        document = read_json(path, PLAN)
    except Unreadable as error:
        raise BadInput(f"Cannot read the plan {str(path)!r}: {error.why}. Write one with plan --json.") from None
    if not isinstance(document, dict) or not isinstance(document.get("plans"), list):
        raise BadInput(f"{path} holds no plans; write one with plan --json, or name a strategy.")
    if not document["plans"]:
        raise BadInput(f"{path} holds no plan, since nothing fitted; its advice says what would.")
    for entry in document["plans"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("strategy"), str):
            raise BadInput(f"{path} holds a plan without a strategy, {shown(entry)}; write one with plan --json.")
    for name in ("cluster", "job"):
        if not isinstance(document.get(name, ""), str | None):
            raise BadInput(f"{path}: its {name} is {shown(document[name])}, which is no text; write it anew.")
    return document


def _picked(plan: dict[str, Any], pick: str | None) -> str:
    """The strategy of the first plan, of the one with a number, or of the one that is named."""
    strategies = [entry["strategy"] for entry in plan["plans"]]
    if pick is None:
        return str(strategies[0])
    if pick.isdecimal() and len(pick) < 10 and 0 < int(pick) <= len(strategies):
        return str(strategies[int(pick) - 1])
    if pick in strategies:
        return pick
    raise BadInput(
        f"--pick {pick!r} is no plan of the file; give a number from 1 to {len(strategies)}, or one of "
        f"{', '.join(strategies[:3])}."
    )


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"The export was to be written to {str(path)!r}, which failed: {one_line(error)} "
            "Name a file in a folder that is there and can be written to."
        ) from error
