"""A few steps under a strategy, and what they leave behind for a comparison."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from meshwright.assemble.step import StepResult, Trainer
from meshwright.assemble.world import World
from meshwright.describe.dropout_off import NoDropout, switch_dropout_off
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.engine import OptimizingEngine
from meshwright.verify.evidence import Evidence, kept_of, outputs_of
from meshwright.verify.float64 import double_arithmetic, in_double
from meshwright.verify.gathered_state import compare_copies, whole_gradients, whole_state
from meshwright.verify.seeded_batch import seeded_batch

LOSS_SCALE = 2.0**8
"""fp16's, held low: at the usual 2**16 one process overflows where the smaller parts of its ranks do not, and skips."""
Plant = Callable[[Trainer], None]
"""Spoils a trainer on purpose; tests use it to see that a defect is found."""


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """What rounding could do to a training."""

    seed: int
    by: float
    """How much of itself a weight is moved by at most."""
    backwards: bool = False
    """Whether the samples of every batch come in the opposite order."""


def run_steps(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    world: World,
    *,
    steps: int,
    seed: int,
    double: bool = False,
    plant: Plant | None = None,
    disturbed: Perturbation | None = None,
) -> Evidence:
    """Train a few steps on made-up batches, in float64 if `double`."""
    job = in_double(job) if double else job
    trace = Evidence(losses=[], norms=[])
    watched = replace(job, loss=_noting_outputs(job, trace)) if world.ranks == 1 and not strategy.compile else job
    trainer = Trainer(watched, facts, strategy, world, seed=seed)
    switch_dropout_off(trainer.engine.model)
    if plant is not None:
        plant(trainer)
    if trainer.loss_scale:
        trainer.loss_scale.value = LOSS_SCALE
    if disturbed:
        _move(trainer, disturbed)
    trace.start.update(whole_state(trainer))
    trace.kept.update(kept_of(trainer.engine.model))
    trace.copies.update(compare_copies(trainer))
    for index in range(steps):
        batch = seeded_batch(job, seed + index)
        with double_arithmetic() if double else nullcontext():
            turned = trainer.cutter.turned(batch) if disturbed and disturbed.backwards else batch
            result = _step(trainer, turned, trace, seed + index)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        if index == 0:
            trace.first.update(whole_state(trainer))
            trace.copies.update(compare_copies(trainer))
    trace.last.update(whole_state(trainer))
    trace.copies.update(compare_copies(trainer))
    return trace


def _step(trainer: Trainer, batch: Any, trace: Evidence, seed: int) -> StepResult:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    with NoDropout():
        trainer.forward_backward(batch)
        if trainer.steps == 0 and _shows_gradients(trainer):
            trace.gradients = whole_gradients(trainer)
        return trainer.update()


def _shows_gradients(trainer: Trainer) -> bool:
    """DeepSpeed's engine keeps them to itself, and those of bf16 and fp16 have no bound of their own."""
    return not isinstance(trainer.engine, OptimizingEngine) and not trainer.strategy.number_format.is_low


def _noting_outputs(job: Job, trace: Evidence) -> Callable[[Any, Any], Any]:
    """The job's loss, which also keeps the model's outputs of the first step."""

    def loss(output: Any, batch: Any) -> Any:
        if not trace.losses and torch.is_grad_enabled():
            trace.outputs.extend(outputs_of(output))
        return job.loss(output, batch)

    return loss


@torch.no_grad()
def _move(trainer: Trainer, disturbed: Perturbation) -> None:
    """Once, at the start: under bf16 and fp16 that is as much as computing with the weights does."""
    generator = torch.Generator().manual_seed(disturbed.seed)
    for parameter in trainer.engine.parameters():
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
        parameter.copy_(parameter.double() * (1 + disturbed.by * noise.to(parameter.device)))
