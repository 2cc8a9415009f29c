"""Worker of the ranks of `train` and `verify`: runs the task and reports results."""

from __future__ import annotations

import socket
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from meshwright.assemble.topology import picture
from meshwright.assemble.world import PATIENCE, World
from meshwright.checkpoint.object_store import ObjectStore
from meshwright.environment import restart_count
from meshwright.jobs.load import load_job
from meshwright.launch.attempt import own_task, report
from meshwright.launch.hangs import watching_itself
from meshwright.launch.heartbeat import beat_while_compiling, own_heartbeat
from meshwright.launch.preemption import Preemption
from meshwright.launch.stragglers import measure_waiting
from meshwright.runtime.checkpoints import Checkpoints, fetch_newest, saved_seed
from meshwright.runtime.out_of_memory import reporting_memory
from meshwright.runtime.request import TrainRequest, TrainTask, VerifyTask
from meshwright.runtime.run import Run, enter_world, setup
from meshwright.runtime.summary import Summary
from meshwright.runtime.train import train
from meshwright.verify.references import StoredReferences
from meshwright.verify.verify import verify

UNWATCHED = timedelta(hours=24)
"""Timeout of collectives if heartbeats are watched, which find a hanging rank sooner."""


def run_train(task: TrainTask) -> dict[str, Any]:
    """Train; returns the summary."""
    request, out = task.request, task.request.out
    resume = out is not None and (request.resume or restart_count() > 0)
    runs: list[Run] = []
    with Preemption(grace=request.grace) as preemption, watching_itself(request.patience):
        world = _enter(request)
        if out is not None and resume and request.store is not None:
            fetch_newest(ObjectStore(request.store), out, world)
        with reporting_memory(world, lambda: runs[0].trainer if runs else None):
            run = setup(
                request.adjust(load_job(request.job)),
                request.strategy,
                seed=saved_seed(out, request.seed) if out is not None and resume else request.seed or 0,
                device=request.device,
                workers=request.workers,
                facts=task.facts,
                world=world,
                deepspeed_config=request.deepspeed_config,
            )
            runs.append(run)
            with run:
                return asdict(_train(request, run, preemption, resume=resume))


def _train(request: TrainRequest, run: Run, preemption: Preemption, *, resume: bool) -> Summary:
    out, checkpoints = request.out, None
    if run.world.ranks > 1 and run.world.device.type == "cpu" and request.patience:
        measure_waiting(own_heartbeat())
    if run.strategy.compile:
        beat_while_compiling()
    if out is not None:
        checkpoints = Checkpoints(
            run,
            out,
            every=request.save_every,
            keep=request.keep,
            keep_every=request.keep_every,
            store=None if request.store is None else ObjectStore(request.store),
        )
        if resume:
            checkpoints.resume()
    return train(
        run,
        steps=request.steps,
        epochs=request.epochs,
        out=out,
        checkpoints=checkpoints,
        preemption=preemption,
        tensorboard=request.tensorboard,
        log_to=request.log_to,
        profile=request.profile,
        check_finite=request.check_finite,
    )


def _enter(request: TrainRequest) -> World:
    """Join the other ranks; with several nodes, rank 0 prints where the strategy's axes are."""
    # Heartbeats find the rank that a collective waits for before the collective times out.
    patience = UNWATCHED if request.patience else PATIENCE
    world = enter_world(request.device, patience=patience, interface=request.interface)
    if world.ranks > world.local_ranks:
        hosts = world.gather(socket.gethostname())[:: world.local_ranks]
        if world.is_main:
            print(picture(request.strategy.resolve(world.ranks), hosts), file=sys.stderr, flush=True)
    return world


def run_verify(task: VerifyTask, patience: timedelta | None = None) -> list[dict[str, Any]]:
    """Verify; reports every verdict as soon as it is known, and returns all."""
    verdicts, request, job = [], task.request, load_job(task.request.job)
    world = enter_world(task.device, patience=patience or timedelta(seconds=request.timeout))
    # Only rank 0 compares, and the references are on its machine.
    made = StoredReferences(task.references) if world.is_main else None
    found = verify(job, task.facts, task.strategies, world, steps=request.steps, seed=request.seed, references=made)
    for number, verdict in enumerate(found, start=1):
        if world.is_main:
            word = verdict.status if verdict.equal else verdict.status.upper()
            print(f"[{number}/{len(task.strategies)}] {verdict.strategy}: {word}", file=sys.stderr, flush=True)
        verdicts.append(verdict.to_json())
        report(verdicts[-1])
    world.leave()
    return verdicts


def main() -> None:
    """Entry point of the worker: `meshwright.launch.rank` calls it on every rank."""
    task = own_task()
    if isinstance(task, TrainTask):
        report(run_train(task))
    else:
        run_verify(task)
