"""Worker of a rank of `compare`: takes a few steps of one strategy and measures them.

checked   without dropout; their losses are compared with those of one process
warm-up   fills allocators and caches; states are counted in the last one
timed     all ranks start each step together; a step ends when the last rank has finished
profiled  one step, in the first round only
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.assemble.check import check
from meshwright.assemble.step import Trainer
from meshwright.describe.dropout import without_dropout
from meshwright.facts.forecast import Measurement
from meshwright.jobs.load import load_job
from meshwright.launch.attempt import own_task, report
from meshwright.runtime.measure import PeakMeter, held_states
from meshwright.runtime.place import place_of
from meshwright.runtime.profile_step import StepProfile, coarsened, profile_step, synchronize
from meshwright.runtime.request import CompareTask
from meshwright.runtime.run import enter_world
from meshwright.verify.plain_training import seeded_batch

CHECKED, WARMUP = 2, 1
SPANS = 300
"""The most spans of a kind that a rank reports of its profiled step."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """Times of one step on one rank, on a clock that all processes of the machine share."""

    start: float
    gradients: float
    """When all gradients were ready."""
    end: float
    actions: list[tuple[str, float, float]]
    """Of a pipeline: actions with their start and end."""


@dataclass(kw_only=True)
class Steps:
    """Measurements of a rank's steps."""

    losses: list[float] = field(default_factory=list)
    states: Measurement = field(default_factory=Measurement)
    timed: list[TimedStep] = field(default_factory=list)


def main() -> None:
    """Entry point of the worker: `meshwright.launch.rank` calls it on every rank."""
    report(measure(own_task()))


def measure(task: CompareTask) -> dict[str, Any]:
    """Run the task's strategy; returns the measurements of all ranks, on every rank."""
    request, job, facts = task.request, load_job(task.request.job), task.facts
    world = enter_world(task.device, patience=timedelta(seconds=request.timeout))
    strategy = check(job, facts, task.strategy, place_of(world, task.strategy))
    meter = PeakMeter(world.device)
    trainer = Trainer(job, facts, strategy, world, seed=request.seed)
    steps = take_steps(trainer, steps=request.steps)
    memory = meter.by_cause(steps.states)
    profile: dict[str, Any] | None = None
    if task.profile:
        batch = seeded_batch(job, request.seed + trainer.steps)
        profile = _for_launcher(profile_step(lambda: trainer.step(batch).loss, world.device))
    own = {
        "place": place_on_mesh(trainer),
        "memory": memory,
        "process": meter.process,
        "steps": [astuple(step) for step in steps.timed],
        "profile": profile,
    }
    ranks = world.gather(own)
    world.leave()
    return {"strategy": str(strategy), "losses": steps.losses, "ranks": ranks}


def take_steps(trainer: Trainer, *, steps: int) -> Steps:
    """Take checked, warm-up and timed steps."""
    found = Steps()
    for index in range(CHECKED + WARMUP + steps):
        batch = seeded_batch(trainer.job, trainer.seed + index)
        if index < CHECKED:
            with without_dropout(trainer.engine.model):
                found.losses.append(trainer.step(batch).loss)
        elif index < CHECKED + WARMUP:
            trainer.forward_backward(batch)
            found.states = held_states(trainer)
            found.losses.append(trainer.update().loss)
        else:
            found.timed.append(_timed_step(trainer, batch, found.losses))
    return found


def _timed_step(trainer: Trainer, batch: Any, losses: list[float]) -> TimedStep:
    world = trainer.world
    synchronize(world.device)
    if world.ranks > 1:
        dist.barrier(group=world.group)
    start = time.perf_counter()
    trainer.forward_backward(batch)
    synchronize(world.device)
    gradients = time.perf_counter()
    losses.append(trainer.update().loss)
    synchronize(world.device)
    end = time.perf_counter()
    actions = [(event.action, event.start, event.end) for event in getattr(trainer.passes, "events", ())]
    return TimedStep(start=start, gradients=gradients, end=end, actions=actions)


def place_on_mesh(trainer: Trainer) -> dict[str, Any]:
    """This rank's place on each axis, and its pipeline stages."""
    axes = trainer.axes
    holders = getattr(trainer.engine, "holders", None)
    return {
        **{name: axes.place_on(name) for name in axes.sizes},
        "sizes": dict(axes.sizes),
        "stages": [] if holders is None else list(holders.own),
    }


def _for_launcher(profile: StepProfile) -> dict[str, Any]:
    """A profile as JSON: exact shares, and coarse spans for a picture."""
    spans = {kind: coarsened(getattr(profile, kind), SPANS) for kind in ("compute", "communication")}
    return {"seconds": profile.seconds, "shares": profile.shares, **spans}
