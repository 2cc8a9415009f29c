"""`meshwright train` and `layout`: check the request before any process starts, then run it in ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.assemble.check import check, check_engine_config
from meshwright.assemble.dry_run import dry_run
from meshwright.checkpoint.object_store import ObjectStore
from meshwright.commands.layout import show_layout
from meshwright.commands.preflight import tell_findings
from meshwright.commands.worker import run_train
from meshwright.describe.data_source import about_evaluation, open_data
from meshwright.describe.model import describe
from meshwright.environment import LaunchedRank, launched, restart_count
from meshwright.errors import BadInput, MeshwrightError, OutOfMemory, OutputError, Refused, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.launch.agent import Agree
from meshwright.launch.launch import launch
from meshwright.launch.on_ray import run_on_ray
from meshwright.runtime.checkpoints import saved_seed
from meshwright.runtime.place import choose_device, count_ranks, fewest_ranks, find_place, known_device
from meshwright.runtime.request import TrainRequest, TrainTask
from meshwright.runtime.run_lock import owned
from meshwright.runtime.run_records import prepare_output, require_tensorboard, write_event

ADVISED_FROM_S = 30.0
"""Seconds of a run from which the planner is asked for advice: that takes seconds, too."""
RESTARTS = 3
"""Default number of restarts of a run that saves checkpoints."""


Replan = Callable[[Job, ModelFacts, TrainRequest, int], Strategy]
"""A strategy like the request's for another number of ranks."""


Diagnose = Callable[[Job, ModelFacts, TrainRequest, Mapping[str, Any]], str]
"""Sentences about a run that ran out of memory, from what its rank reported."""


Advise = Callable[[Job, ModelFacts, TrainRequest, Mapping[str, Any]], str]
"""A sentence about what would make the next run faster, from the summary."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What a run asks the planner. Without one of them, that question is not asked."""

    replan: Replan | None = None
    """Asked when the run has lost or gained nodes and its strategy does not fit any more."""
    diagnose: Diagnose | None = None
    """Asked when a rank has run out of memory, which ends the run: the same would happen again."""
    advise: Advise | None = None
    """Asked after a run, if the request wants advice."""


def train_command(request: TrainRequest, planning: Planning | None = None) -> dict[str, Any] | None:
    """Train with the run's folder locked; returns the summary on rank 0, and None on other ranks."""
    planning = planning or Planning()
    place = launched()
    if request.nodes is not None and place is not None:
        raise BadInput("--nodes was given, but a launcher started this process; leave it out: the launcher has nodes.")
    with owned(request.out) if request.out is not None and _is_first(request, place) else nullcontext():
        task = _checked(request)
        try:
            summary = _train(task, place, planning.replan)
        except OutOfMemory as error:
            raise _diagnosed(task, error, planning.diagnose) from None
        return _advised(task, summary, planning.advise)


def _advised(task: TrainTask, summary: dict[str, Any] | None, advise: Advise | None) -> dict[str, Any] | None:
    """The summary with advice, where the run was long enough for it or asked for it."""
    if summary is None or summary["limit"] is None or advise is None:
        return summary
    wanted = task.request.advise
    if wanted is False or (wanted is None and summary["seconds"] < ADVISED_FROM_S):
        return summary
    request = task.request
    with redirect_stdout(sys.stderr):
        try:
            return {**summary, "advice": advise(request.adjust(load_job(request.job)), task.facts, request, summary)}
        except MeshwrightError as failed:
            return {**summary, "advice": f"No word could be looked for: {one_line(failed)}"}


def _diagnosed(task: TrainTask, error: OutOfMemory, diagnose: Diagnose | None) -> OutOfMemory:
    """The error with what to do; as it is, if that cannot be found out."""
    request = task.request
    if request.out is not None:
        write_event(request.out, "out of memory", strategy=str(request.strategy), ranks=request.ranks, **error.details)
    words = [str(error), "The run is not restarted: it would run out of memory again."]
    if diagnose is not None and _is_first(request, None):
        print("A rank ran out of memory; looking for a strategy that fits.", file=sys.stderr, flush=True)
        with redirect_stdout(sys.stderr):
            try:
                job = request.adjust(load_job(request.job))
                words.append(diagnose(job, task.facts, request, error.details))
            except Exception as failed:  # among them torch's own, if it is this process that has no memory left
                words.append(f"No strategy could be looked for: {one_line(failed)}")
    return OutOfMemory("\n".join(words), error.details)


def _is_first(request: TrainRequest, place: LaunchedRank | None) -> bool:
    """Whether this process is the one that prepares the run's folder and prints its result."""
    return (place is None or place.rank == 0) and (request.nodes is None or request.nodes.rank == 0)


def _checked(request: TrainRequest) -> TrainTask:
    """The task of the ranks, after all checks that need no process."""
    strategy, out = request.strategy, request.out
    if out is None and (request.resume or request.save_every):
        option = "--resume" if request.resume else "--save-every"
        raise BadInput(f"{option} needs the run's folder; give it with --out.")
    if out is None and request.store is not None:
        raise BadInput("--store needs a folder for each node's own copy; give it with --out.")
    if strategy.offload == "nvme" and out is not None:
        raise Refused(f"No checkpoint is made under {strategy}, so --out has nothing to keep; leave it out.")
    if request.ray is not None and (request.nodes is not None or launched() is not None):
        raise BadInput("--on ray starts the ranks itself; leave out --nodes, and do not start it under a launcher.")
    if request.on_hang not in ("restart", "end"):
        raise BadInput(f"--on-hang must be restart or end, not {request.on_hang!r}.")
    device = known_device(request.device) if request.ray is not None else None
    device = device or choose_device(known_device(request.device))
    nodes = 1 if request.nodes is None else request.nodes.most
    count = nodes * count_ranks(request.ranks, default=_default_ranks(strategy, device, nodes))
    job, facts = load_and_describe(request.job)
    adjusted = request.adjust(job)
    place = find_place(device, count, strategy, nodes=nodes)
    if request.ray is not None:
        place = replace(place, devices=count)  # on the cluster's machines, which may be unlike this one
    resolved = check(adjusted, facts, strategy, place)
    if request.deepspeed_config is not None:
        check_engine_config(request.deepspeed_config, adjusted, resolved)
    dry_run(job, facts, resolved)
    if _is_first(request, launched()):
        tell_findings(job, facts, [resolved])
    open_data(job)
    if job.evaluation is not None:
        with about_evaluation():
            open_data(job.for_evaluation())
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
        resume=request.resume or (out is not None and restart_count() > 0),  # torchrun restarts the whole command
    )
    return TrainTask(request=checked, facts=facts)


def _default_ranks(strategy: Strategy, device: str, nodes: int) -> int:
    """The ranks of each node, if --ranks is missing."""
    fewest = fewest_ranks(strategy, device)
    if fewest % nodes and fewest > 1:
        raise BadInput(f"{strategy} needs {fewest} ranks, which {nodes} nodes cannot share equally; give --ranks.")
    return max(1, fewest // nodes)


def _train(task: TrainTask, place: LaunchedRank | None, replan: Replan | None) -> dict[str, Any] | None:
    """Train in launched ranks, in this process alone, or in ranks that are started now."""
    request, out, count = task.request, task.request.out, task.request.ranks or 1
    first = _is_first(request, place)
    if out is not None and first:
        prepare_output(out, resume=request.resume)
        if request.store is not None:
            _prepare_store(ObjectStore(request.store), count, resume=request.resume)
        if request.resume:
            saved_seed(out, request.seed)  # refuses a different seed before any process starts
    restarts = request.max_restarts
    if restarts is None:
        restarts = RESTARTS if out is not None and count > 1 else 0
    if request.ray is not None:
        return run_on_ray(
            run_train, partial(_again, task), count, request.ray, device=request.device or "cpu", restarts=restarts
        )
    alone = request.strategy.traits.many_devices or (count == 1 and not restarts)
    if place is not None or (alone and request.nodes is None):
        with redirect_stdout(sys.stderr):
            summary = run_train(task)
        return summary if first else None
    results: list[Any] = []
    launch(
        task,
        count if request.nodes is None else count // request.nodes.most,
        results=results,
        max_restarts=restarts,
        grace=request.grace,
        patience=request.patience,
        hang_ends=request.on_hang == "end",
        nodes=request.nodes,
        adapt=None if replan is None or request.nodes is None else partial(_adapted, task, replan),
    )
    return results[0] if first else None


def _again(task: TrainTask, attempt: int) -> TrainTask:
    """The task of an attempt; after the first, it goes on from the last checkpoint."""
    resumes = attempt > 0 and task.request.out is not None
    return replace(task, request=replace(task.request, resume=True)) if resumes else task


def _prepare_store(store: ObjectStore, ranks: int, *, resume: bool) -> None:
    """Refuse a store that ranks cannot share or write, and without `resume` one that holds a run."""
    if not store.shared and ranks > 1:
        raise BadInput(f"{store.url} is the memory of one process, but there are {ranks} ranks; use file:// or s3://.")
    store.check()
    if not resume and store.complete():
        raise OutputError(f"{store.url} already holds a run; continue it with --resume or choose another --store.")


def _adapted(task: TrainTask, replan: Replan, ranks: int, agree: Agree) -> TrainTask:
    """The task for a number of ranks: under the same strategy, or under the nearest that fits, which is printed."""
    request = task.request
    if ranks == request.ranks:
        return task
    with redirect_stdout(sys.stderr):
        text = agree(lambda: str(replan(request.adjust(load_job(request.job)), task.facts, request, ranks)))
    chosen = Strategy.parse(text)
    if chosen != request.strategy:
        words = f"{request.strategy} does not fit {ranks} ranks; the run goes on as {chosen}"
        print(f"{words}, with the same global batch", file=sys.stderr, flush=True)
    return replace(task, request=replace(request, strategy=chosen, ranks=ranks))


def layout_command(*, job: str, strategy: str, ranks: int | None) -> dict[str, Any]:
    """The layout of a strategy, by default on as few ranks as it needs."""
    parsed = Strategy.parse(strategy)
    loaded, facts = load_and_describe(job)
    return show_layout(loaded, facts, parsed, ranks or parsed.model_ranks * (parsed.data_size or 1))


def load_and_describe(job: str) -> tuple[Job, ModelFacts]:
    with redirect_stdout(sys.stderr):
        loaded = load_job(job)
        return loaded, describe(loaded)
