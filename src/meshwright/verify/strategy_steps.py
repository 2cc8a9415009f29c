"""Take a few steps under a strategy and keep their results for a comparison."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy
import torch

from meshwright.assemble.step import StepResult, Trainer
from meshwright.assemble.world import World
from meshwright.describe.dropout import NoDropout, switch_dropout_off
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.engine import OptimizingEngine
from meshwright.verify.evidence import Evidence, kept_of, outputs_of
from meshwright.verify.float64 import double_arithmetic, in_double
from meshwright.verify.gathered_state import compare_copies, whole_gradients, whole_state
from meshwright.verify.plain_training import Perturbation, move_weights
from meshwright.verify.seeded_batch import seeded_batch

LOSS_SCALE = 2.0**8
"""Of fp16, kept low: at the usual 2**16 one process may overflow and skip where the smaller parts of ranks do not."""
Plant = Callable[[Trainer], None]
"""Puts a defect into a trainer; tests use it to check that the defect is found."""


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
    if disturbed:  # once, at the start: under bf16 and fp16 that has as much effect as computing with the weights
        move_weights(trainer.engine.parameters(), disturbed.seed, disturbed.by)
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
    """Not under DeepSpeed, whose engine hides gradients, nor in bf16 and fp16, whose gradients have no bound."""
    return not isinstance(trainer.engine, OptimizingEngine) and not trainer.strategy.number_format.is_low


def _noting_outputs(job: Job, trace: Evidence) -> Callable[[Any, Any], Any]:
    """The job's loss, which also records the model's outputs of the first step."""

    def loss(output: Any, batch: Any) -> Any:
        if not trace.losses and torch.is_grad_enabled():
            trace.outputs.extend(outputs_of(output))
        return job.loss(output, batch)

    return loss
