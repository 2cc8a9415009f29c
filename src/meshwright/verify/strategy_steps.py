"""Take a few steps under a strategy and gather their results for a comparison.

It also checks that ranks hold equal copies of the same part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from meshwright.assemble.step import Trainer
from meshwright.assemble.step_result import StepResult
from meshwright.assemble.world import World
from meshwright.describe.dropout import NoDropout, switch_dropout_off
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.cuts import Cut
from meshwright.strategies.engine import HeldTensor, OptimizingEngine
from meshwright.strategies.norm import local
from meshwright.verify.evidence import Evidence, State, kept_of, outputs_of
from meshwright.verify.float64 import double_arithmetic, in_double
from meshwright.verify.plain_training import Perturbation, move_weights, seeded_batch

LOSS_SCALE = 2.0**8
"""Of fp16, kept low: at the usual 2**16 one process may overflow and skip where the smaller parts of ranks do not."""
APART = 2.0**-16
"""Allowed difference of copies, relative to their size. Ranks get the same bits of a sum, but may round differently
what each computes itself. A copy that was not updated is off by a whole update."""
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
    dropout: bool = False,
    plant: Plant | None = None,
    disturbed: Perturbation | None = None,
) -> Evidence:
    """Train a few steps on made-up batches, in float64 if `double`, with the model's dropout if `dropout`."""
    job = in_double(job) if double else job
    trace = Evidence(losses=[], norms=[])
    watched = replace(job, loss=_noting_outputs(job, trace)) if world.ranks == 1 and not strategy.compile else job
    trainer = Trainer(watched, facts, strategy, world, seed=seed)
    if not dropout:
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
        with double_arithmetic() if double else nullcontext(), nullcontext() if dropout else NoDropout():
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
            trace.outputs.append(outputs_of(output))
        return job.loss(output, batch)

    return loss


def whole_state(trainer: Trainer) -> State:
    """Full parameters and buffers on rank 0. The other ranks must call it too, and get nothing."""
    return _on_main(trainer, trainer.engine.state())


def whole_gradients(trainer: Trainer) -> State:
    """Full gradients on rank 0, between `forward_backward` and `update`."""
    own = {held.name for held in trainer.engine.held() if held.tensor.grad is not None}
    # Gathering is collective: ranks without a gradient that another has must take part.
    names = frozenset().union(*trainer.world.gather(own))
    return _on_main(trainer, trainer.engine.collect(_gradient, names))


def _gradient(held: HeldTensor) -> torch.Tensor:
    gradient = held.tensor.grad
    return torch.zeros_like(held.tensor).detach() if gradient is None else gradient.detach()


def _on_main(trainer: Trainer, tensors: Iterator[tuple[str, torch.Tensor]]) -> State:
    found = {}
    for name, tensor in tensors:
        if trainer.world.is_main:
            found[name] = tensor.detach().to("cpu", copy=True)
    return found


@dataclass(frozen=True)
class Digest:
    """A tensor in two numbers, so that copies can be compared without sending them."""

    size: float
    projection: float

    def equals(self, other: Digest) -> bool:
        apart = abs(self.projection - other.projection)
        return apart <= APART * max(self.size, other.size) or (apart != apart and self.size != self.size)


Copies = dict[tuple[str, str], Digest]
"""By name and part of the full tensor."""


def compare_copies(trainer: Trainer) -> dict[int, str]:
    """By step, a sentence about the first tensor of which a rank's copy is stale or differs from its peers'."""
    if trainer.world.ranks == 1 or isinstance(trainer.engine, OptimizingEngine):  # DeepSpeed hides its parts
        return {}
    when = f"after step {trainer.steps}" if trainer.steps else "before the first step"
    for rank, name in enumerate(trainer.world.gather(_stale(trainer))):
        if name is not None:
            return {trainer.steps: f"{name}: rank {rank} computes with a stale copy of it {when}"}
    first: dict[tuple[str, str], tuple[int, Digest]] = {}
    for rank, copies in enumerate(trainer.world.gather(_digests(trainer))):
        for key, digest in copies.items():
            other, known = first.setdefault(key, (rank, digest))
            if not known.equals(digest):
                return {trainer.steps: f"{key[0]}: rank {rank} holds another copy than rank {other} {when}"}
    return {}


def _stale(trainer: Trainer) -> str | None:
    """The first parameter that the model computes with and that differs from the updated one, if they are separate."""
    computed = dict(trainer.engine.model.named_parameters(remove_duplicate=False))
    apart = {held.name for held in trainer.engine.held() if held.tensor is not computed.get(held.name, held.tensor)}
    names = frozenset().union(*trainer.world.gather(apart))
    found = None
    for name, tensor in trainer.engine.collect(lambda held: held.tensor.detach(), names):
        own: torch.Tensor = computed.get(name, tensor)
        alike = not is_dtensor(own) and own.shape == tensor.shape and own.dtype == tensor.dtype
        if found is None and alike and not _digest(own).equals(_digest(tensor)):
            found = name
    return found


def _digests(trainer: Trainer) -> Copies:
    found = {}
    for held in trainer.engine.held():
        if held.current and (held.cut is None or isinstance(held.cut, Cut)):
            found[held.name, _part(held)] = _digest(held.tensor)
    known = {name for name, _ in found}
    for name, buffer in trainer.engine.model.named_buffers():
        if name not in known and not is_dtensor(buffer):
            found[name, f"stage {trainer.axes.stage_rank}"] = _digest(buffer)
    return found


def _part(held: HeldTensor) -> str:
    """The part of the full tensor that a rank holds: its places on the axes that divide it."""
    places: list[Any] = []
    tensor = held.tensor
    if is_dtensor(tensor):
        coordinate: Any = tensor.device_mesh.get_coordinate() or ()
        places += [place for place, how in zip(coordinate, tensor.placements, strict=True) if how.is_shard()]
    if isinstance(held.cut, Cut):
        places.append(f"cut {held.cut.mesh.get_local_rank()}")
    return str(places)


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> Digest:
    """The 2-norm, and the dot product with random numbers that are the same on all ranks."""
    values = local(tensor.detach()).reshape(-1).double().cpu()
    noise = torch.rand(values.numel(), generator=torch.Generator().manual_seed(values.numel()), dtype=torch.float64)
    return Digest(float(values.norm()), float(torch.dot(values, noise * 2 - 1)))
