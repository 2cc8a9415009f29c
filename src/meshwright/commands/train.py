"""What the command line asks for: checked here, before any process starts, then done by ranks."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

from meshwright.assemble.check import check, check_engine_config
from meshwright.assemble.dry_run import dry_run
from meshwright.commands.layout import show_layout
from meshwright.commands.worker import run_train
from meshwright.describe.model import describe
from meshwright.environment import LaunchedRank, launched, restart_count
from meshwright.errors import BadInput, Refused
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.launch.launch import launch
from meshwright.runtime.checkpoints import saved_seed
from meshwright.runtime.place import choose_device, has_one_process_axis, in_one_process, place_for, place_of_layers
from meshwright.runtime.request import TrainRequest, TrainTask
from meshwright.runtime.run_lock import owned
from meshwright.runtime.run_records import prepare_output, require_tensorboard

RESTARTS = 3
"""How often a run that saves itself is restarted where nobody says otherwise."""


def train_command(request: TrainRequest) -> dict[str, Any] | None:
    """Train, alone in the run's folder; returns the summary, or None on a rank that has nothing to print."""
    place = launched()
    mine = request.out if place is None or place.rank == 0 else None
    with nullcontext() if mine is None else owned(mine):
        return _train(_checked(request), place)


def _checked(request: TrainRequest) -> TrainTask:
    """What the ranks do, after all checks that need no process."""
    strategy, out = request.strategy, request.out
    if out is None and (request.resume or request.save_every):
        option = "--resume" if request.resume else "--save-every"
        raise BadInput(f"{option} needs the run's folder; give it with --out.")
    if strategy.offload == "nvme" and out is not None:
        raise Refused(f"No checkpoint is made under {strategy}, so --out has nothing to keep; leave it out.")
    device = choose_device(known_device(request.device))
    count = count_ranks(request.ranks, default=_fewest_ranks(strategy, device))
    job, facts = load_and_describe(request.job)
    in_one = count == 1 and has_one_process_axis(strategy)
    clipped = request.clip(job)
    resolved = check(
        clipped, facts, strategy, place_of_layers(device, strategy) if in_one else find_place(device, count)
    )
    if request.deepspeed_config is not None:
        check_engine_config(request.deepspeed_config, clipped, resolved)
    dry_run(job, facts, resolved)
    if facts.drops and (note := dropout_note(resolved)):
        print(f"note: {note}", file=sys.stderr)
    job.dataset()
    if request.tensorboard:
        require_tensorboard()
        if out is None:
            raise BadInput("--tensorboard writes into the run's folder; give --out a folder.")
    checked = replace(
        request,
        strategy=replace(strategy, data_size=count) if strategy.traits.many_devices else strategy,
        ranks=count,
        device=device,
        out=None if out is None else out.resolve(),
        resume=request.resume or (out is not None and restart_count() > 0),  # torchrun restarts all of the command
    )
    return TrainTask(request=checked, facts=facts)


def _train(task: TrainTask, place: LaunchedRank | None) -> dict[str, Any] | None:
    """By ranks that are there, by this process alone, or by ranks that are started for it."""
    request, out, count = task.request, task.request.out, task.request.ranks or 1
    if out is not None and (place is None or place.rank == 0):
        prepare_output(out, resume=request.resume)
        if request.resume:
            saved_seed(out, request.seed)  # refuses another seed before any process starts
    restarts = request.max_restarts
    if restarts is None:
        restarts = RESTARTS if out is not None and count > 1 else 0
    if place is not None or request.strategy.traits.many_devices or (count == 1 and not restarts):
        with redirect_stdout(sys.stderr):
            summary = run_train(task)
        return summary if place is None or place.rank == 0 else None
    results: list[Any] = []
    launch(task, count, results=results, max_restarts=restarts, grace=request.grace, patience=request.patience)
    return results[0]  # type: ignore[no-any-return]


def dropout_note(strategy: Strategy) -> str:
    """What to say of a job with dropout whose masks are not those of one process; empty where they are."""
    if strategy.compile:
        why = "compiled code draws its own"
    elif strategy.model_ranks > 1:
        why = "it divides the model, and each part draws for itself"
    elif strategy.data_ranks > 1 or strategy.micro_batch is not None:
        why = "each micro-batch draws for itself; strategies that cut the batch alike draw the same"
    else:
        return ""
    return (
        f"{strategy} draws other random numbers (dropout) than one process would: {why}. "
        "They are equal in distribution, not in bits; see docs/same-training.md."
    )


def layout_command(*, job: str, strategy: str, ranks: int | None) -> dict[str, Any]:
    """How a strategy would lie, on as few ranks as it needs where no number is given."""
    parsed = Strategy.parse(strategy)
    loaded, facts = load_and_describe(job)
    return show_layout(loaded, facts, parsed, ranks or parsed.model_ranks * (parsed.data_size or 1))


def load_and_describe(job: str) -> tuple[Job, ModelFacts]:
    with redirect_stdout(sys.stderr):
        loaded = load_job(job)
        return loaded, describe(loaded)


def count_ranks(asked: int | None, *, default: int) -> int:
    place = launched()
    if place is None:
        return asked or default
    if asked is not None and asked != place.ranks:
        raise BadInput(f"--ranks {asked} was asked for, but the launcher started {place.ranks} ranks; leave it out.")
    return place.ranks


def _fewest_ranks(strategy: Strategy, device: str) -> int:
    """As many as the strategy's sizes ask for; layers over GPUs run in one process where nobody asks for ranks."""
    if in_one_process(strategy) and strategy.data is None and device == "cuda":
        return 1
    return strategy.model_ranks * (strategy.data_size or 1)


def find_place(device: str, ranks: int) -> Any:
    place = launched()
    return place_for(device, ranks, local_ranks=place.local_ranks if place else ranks)


def known_device(device: str | None) -> str | None:
    if device not in (None, "cpu", "cuda"):
        raise BadInput(f"--device must be cpu or cuda, not {device!r}.")
    return device
