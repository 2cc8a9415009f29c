"""`meshwright train`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.outcome import print_result
from meshwright.cli.term_help import with_terms
from meshwright.errors import BadInput, MeshwrightError
from meshwright.importing import importing

if TYPE_CHECKING:
    from meshwright.facts.job import Job
    from meshwright.facts.model import ModelFacts
    from meshwright.facts.strategy import Strategy
    from meshwright.runtime.profile_train import ProfileOptions
    from meshwright.runtime.request import TrainRequest

NOTES = with_terms("Under torchrun, Slurm or Kubernetes, the launcher sets the ranks.")


def train(
    job: Annotated[str, typer.Argument(help="A Python file with a variable `job`, or file.py:name.")],
    strategy: Annotated[str | None, typer.Option(help="A strategy such as fsdp,bf16, or auto; default: ddp.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per device.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps of the whole run, including resumed ones; default: 100."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of the whole run: every sample once in each. See also --steps.")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Evaluate every N steps instead of as the job says.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for records and checkpoints.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Object storage for checkpoints: s3://BUCKET/RUN; --out is then a node's copy.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, under any strategy.")] = False,
    save_every: Annotated[int, typer.Option(min=0, help="Save every N steps; 0: only at the end.")] = 0,
    keep: Annotated[int, typer.Option(min=0, help="Checkpoints to keep, the newest ones; 0: all.")] = 3,
    keep_every: Annotated[int, typer.Option(min=0, help="Also keep one checkpoint every N steps.")] = 0,
    nodes: Annotated[
        str | None, typer.Option(help="Machines of the run, each of which starts this command: 2, or 1:2 for 1 or 2.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Number of this machine, from 0.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT at which node 0 listens, the same on all nodes.")
    ] = None,
    node_wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for nodes that are missing.")] = 600.0,
    interface: Annotated[
        str | None, typer.Option(help="Network interface between nodes; default: the one towards the rendezvous.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", help="Start the ranks on a Ray cluster: ray, or ray://HOST:PORT.")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Restarts after a killed or crashed rank; default: 3 with --out.")
    ] = None,
    grace: Annotated[float, typer.Option(min=1, help="Seconds to save and exit after SIGTERM or SIGUSR1.")] = 30.0,
    patience: Annotated[
        float,
        typer.Option(min=0, help="Seconds a rank may be silent beyond its longest step; 0: no limit."),
    ] = 120.0,
    on_hang: Annotated[str, typer.Option(help="What follows when a rank hangs: restart, or end.")] = "restart",
    seed: Annotated[
        int | None, typer.Option(help="Seed for initial weights, data order and dropout; default: 0.")
    ] = None,
    max_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm instead of the job's.")] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Data-loading processes per rank; 0: as many as the job's DataLoader has.")
    ] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU.")] = None,
    deepspeed_config: Annotated[
        Path | None, typer.Option(help="A DeepSpeed JSON config; sets the strategy if --strategy is missing.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Same as --log-to tensorboard.")] = False,
    log_to: Annotated[
        list[str] | None,
        typer.Option(help="Also send records to tensorboard, wandb or mlflow; repeatable."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Steps to trace with torch.profiler into --out: 5, or 5-7.")
    ] = None,
    profile_ranks: Annotated[str, typer.Option(help="Ranks to trace: 0, or 0,3, or all.")] = "0",
    check_finite: Annotated[
        bool,
        typer.Option("--check-finite", help="Check gradients before each update, to name a NaN's module on a GPU."),
    ] = False,
    advise: Annotated[
        bool | None,
        typer.Option("--advise/--no-advise", help="Say which word would be faster; default: after 30 s and more."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Train a job under a strategy.

    [bold]meshwright train examples/gpt.py --strategy fsdp --ranks 2 --steps 60[/]

    [bold]meshwright train examples/cnn.py --strategy ddp --ranks 2 --steps 100 --out runs/cnn --save-every 20[/]

    [bold]meshwright train examples/cnn.py --strategy fsdp --ranks 4 --steps 200 --out runs/cnn --resume[/]

    [bold]meshwright train examples/epochs.py --ranks 2 --epochs 3 --eval-every 10 --out runs/epochs[/]

    [bold]meshwright train examples/gpt.py --ranks 2 --steps 20 --out runs/gpt --profile 5-7 --log-to wandb[/]

    [bold]meshwright train job.py --deepspeed-config ds.json --ranks 8[/]

    [bold]meshwright train job.py --strategy hsdp=2x8 --ranks 8 --nodes 2 --node-rank 0 --rendezvous node0:29500[/]

    [bold]meshwright train job.py --strategy fsdp --ranks 16 --on ray --out /shared/run --store s3://bucket/run[/]

    [bold]torchrun --nproc-per-node 8 -m meshwright train job.py --strategy fsdp,bf16,ac=selective[/]
    """
    with importing():
        from meshwright.commands.train import Planning, train_command
        from meshwright.environment import silent_profiler
        from meshwright.facts.strategy import Strategy
        from meshwright.launch.node_options import node_options
        from meshwright.launch.on_ray import RayOptions
        from meshwright.report.tables import summary_page
        from meshwright.runtime.request import TrainRequest
        from meshwright.runtime.sinks import check_services
        from meshwright.strategies.deepspeed.user_config import read_config, strategy_of

    config = None if deepspeed_config is None else read_config(deepspeed_config)
    if strategy is None and config is not None:
        wanted = strategy_of(config)
    else:
        wanted = Strategy.parse("ddp" if strategy is None else strategy)
    services = log_to or []
    check_services(services, out)
    request = TrainRequest(
        job=job,
        strategy=wanted,
        ranks=ranks,
        steps=100 if steps is None and epochs is None else steps,
        epochs=epochs,
        eval_every=eval_every,
        out=out,
        store=store,
        resume=resume,
        save_every=save_every,
        keep=keep,
        keep_every=keep_every,
        max_restarts=max_restarts,
        grace=grace,
        patience=patience,
        on_hang=on_hang,
        seed=seed,
        max_norm=max_norm,
        workers=workers,
        device=device,
        tensorboard=tensorboard or "tensorboard" in services,
        log_to=tuple(name for name in services if name != "tensorboard"),
        profile=_profile(profile, profile_ranks, out),
        advise=advise,
        check_finite=check_finite,
        deepspeed_config=config,
        nodes=node_options(nodes, node_rank, rendezvous, interface=interface, wait=node_wait),
        interface=interface,
        ray=None if on is None else RayOptions.parse(on),
    )
    with silent_profiler():
        planning = Planning(replan=_nearest, diagnose=_diagnose, advise=_advise)
        summary = train_command(replace(request, strategy=_chosen(request)), planning)
    if summary is not None:
        summary["forecast"] = _compare(summary, request)
        print_result(summary, summary_page(summary), as_json=as_json)
        if summary["failed_saves"] and summary["saved"] != summary["steps"]:
            raise MeshwrightError(f"The run's last state, step {summary['steps']}, could not be saved; see above.")


def _compare(summary: dict[str, Any], request: TrainRequest) -> dict[str, Any] | None:
    """The run beside what `rehearse` or `plan` said about it, also as an event of the run's folder."""
    from meshwright.api.kept_forecasts import compare_run
    from meshwright.runtime.run_records import write_event

    found = compare_run(summary, request.job)
    if found is not None and request.out is not None:
        write_event(request.out, "forecast against measured", **found)
    return found


def _profile(steps: str | None, ranks: str, out: Path | None) -> ProfileOptions | None:
    """Which steps of which ranks to profile."""
    from meshwright.runtime.profile_train import ProfileOptions

    if steps is None:
        return None
    if out is None:
        raise BadInput("--profile writes traces into the run's folder; give --out a folder.")
    return ProfileOptions.parse(steps, ranks)


def _nearest(job: Job, facts: ModelFacts, request: TrainRequest, ranks: int) -> Strategy:
    """The strategy that is nearest to the requested one and fits this number of ranks."""
    from meshwright.api.nearest import nearest_strategy

    assert request.nodes is not None and request.ranks is not None
    per_node = request.ranks // request.nodes.most
    return nearest_strategy(job, facts, request.strategy, ranks=ranks, per_node=per_node, device=request.device)


def _diagnose(job: Job, facts: ModelFacts, request: TrainRequest, details: Mapping[str, Any]) -> str:
    """Where a run's memory went, and the nearest strategy that fits."""
    from meshwright.api.doctor import diagnose
    from meshwright.facts.memory_report import MemoryReport

    return diagnose(
        job,
        facts,
        request.strategy,
        MemoryReport.from_json(details) if details else None,
        ranks=request.ranks or 1,
        nodes=1 if request.nodes is None else request.nodes.most,
        device=request.device,
        saves=bool(request.save_every),
    ).sentences()


def _advise(job: Job, facts: ModelFacts, request: TrainRequest, summary: Mapping[str, Any]) -> str:
    """The one word that would be worth trying after a run."""
    from meshwright.api.one_word import advise_word

    return advise_word(
        job,
        facts,
        request.strategy,
        summary["limit"],
        step=summary["step_ms"] / 1e3,
        ranks=request.ranks or 1,
        nodes=1 if request.nodes is None else request.nodes.most,
        workers=request.workers,
        device=request.device,
    )


def _chosen(request: TrainRequest) -> Strategy:
    """The requested strategy; for `auto`, the planner's choice, which is printed."""
    if not request.strategy.auto:
        return request.strategy
    from meshwright.api.setup import resolve_auto
    from meshwright.jobs.load import load_job

    most = 1 if request.nodes is None else request.nodes.most
    job = load_job(request.job)
    chosen = resolve_auto(job, request.strategy, ranks=request.ranks, device=request.device, nodes=most)
    print(f"auto: {chosen}", file=sys.stderr)
    return chosen
