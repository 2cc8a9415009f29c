"""What a rank of `compare` runs: one strategy, a few steps of it, and all that there is to measure about them.

checked   without dropout, and their losses are held against one process
warm-up   allocators and caches fill; states are counted in the last
timed     all ranks start each step together; a step ends when the last rank is through
profiled  one step, in the first round only
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.assemble.check import check
from meshwright.assemble.step import StepResult, Trainer
from meshwright.assemble.world import World
from meshwright.compare.memory import PeakMeter
from meshwright.describe.dropout_off import without_dropout
from meshwright.facts.forecast import Measurement
from meshwright.jobs.load import load_job
from meshwright.launch.attempt import own_task, report
from meshwright.runtime.measure import held_states
from meshwright.runtime.place import place_of
from meshwright.runtime.profile_step import StepProfile, coarsened, profile_step
from meshwright.runtime.request import CompareTask
from meshwright.runtime.run import enter_world
from meshwright.verify.seeded_batch import seeded_batch

CHECKED, WARMUP = 2, 1
SPANS = 300
"""The most spans of a kind that a rank tells of its profiled step."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """When one rank took one step: readings of a clock that all processes of a machine share."""

    start: float
    gradients: float
    """When they were all there."""
    end: float
    actions: list[tuple[str, float, float]]
    """Of a pipeline: what was computed, from when to when."""


@dataclass(kw_only=True)
class Seen:
    """What a rank has seen so far."""

    losses: list[float] = field(default_factory=list)
    states: Measurement = field(default_factory=Measurement)
    steps: list[TimedStep] = field(default_factory=list)
    profile: StepProfile | None = None


def main() -> None:
    """What `meshwright.launch.rank` calls on every rank."""
    report(measure(own_task()))


def measure(task: CompareTask) -> dict[str, Any]:
    """Run a strategy as asked; what all ranks saw, on every rank."""
    request, job, facts = task.request, load_job(task.request.job), task.facts
    world = enter_world(task.device, patience=timedelta(seconds=request.timeout))
    strategy = check(job, facts, task.strategy, place_of(world, task.strategy))
    meter = PeakMeter(world.device)
    trainer = Trainer(job, facts, strategy, world, seed=request.seed)
    seen = take_steps(trainer, steps=request.steps)
    memory = meter.by_cause(seen.states)
    if task.profile:
        batch = seeded_batch(job, request.seed + trainer.steps)
        seen.profile = profile_step(lambda: trainer.step(batch).loss, world.device)
    own = {
        "place": place_on_mesh(trainer),
        "memory": memory,
        "process": meter.process,
        "steps": [(step.start, step.gradients, step.end, step.actions) for step in seen.steps],
        "profile": None if seen.profile is None else _told(seen.profile),
    }
    ranks = world.gather(own)
    world.leave()
    return {"strategy": str(strategy), "losses": seen.losses, "ranks": ranks}


def take_steps(trainer: Trainer, *, steps: int) -> Seen:
    """Checked, warm-up and timed steps."""
    seen, job = Seen(), trainer.job
    for index in range(CHECKED + WARMUP + steps):
        batch = seeded_batch(job, trainer.seed + index)
        if index < CHECKED:
            with without_dropout(trainer.engine.model):
                _whole_step(trainer, batch, seen)
        elif index < CHECKED + WARMUP:
            trainer.forward_backward(batch)
            seen.states = held_states(trainer)
            seen.losses.append(trainer.update().loss)
        else:
            seen.steps.append(_timed_step(trainer, batch, seen))
    return seen


def _whole_step(trainer: Trainer, batch: Any, seen: Seen) -> None:
    seen.losses.append(trainer.step(batch).loss)


def _timed_step(trainer: Trainer, batch: Any, seen: Seen) -> TimedStep:
    _meet(trainer.world)
    start = time.perf_counter()
    trainer.forward_backward(batch)
    _finish(trainer.world)
    gradients = time.perf_counter()
    result: StepResult = trainer.update()
    seen.losses.append(result.loss)
    _finish(trainer.world)
    end = time.perf_counter()
    events = getattr(trainer.passes, "events", ())
    actions = [(event.action, event.start, event.end) for event in events]
    return TimedStep(start=start, gradients=gradients, end=end, actions=actions)


def _meet(world: World) -> None:
    _finish(world)
    if world.ranks > 1:
        dist.barrier(group=world.group)


def _finish(world: World) -> None:
    """Wait for what this rank has started on its device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def place_on_mesh(trainer: Trainer) -> dict[str, Any]:
    """Where this rank lies on each axis, and which stages of a pipeline it has."""
    axes = trainer.axes
    holders = getattr(trainer.engine, "holders", None)
    return {
        **{name: axes.place_on(name) for name in axes.sizes},
        "sizes": dict(axes.sizes),
        "stages": [] if holders is None else list(holders.own),
    }


def _told(profile: StepProfile) -> dict[str, Any]:
    """A profile for the launcher: exact shares, and spans for a picture."""
    spans = {kind: coarsened(getattr(profile, kind), SPANS) for kind in ("compute", "communication")}
    return {"seconds": profile.seconds, "shares": profile.shares, **spans}
