"""Train in plain PyTorch: call the user's builder, and run an ordinary training loop.

It uses nothing of Meshwright's recording, filling, casting or stepping, which are compared with it.
Batches are synthetic and the same in every process. Random generators are seeded before each step by the documented
rule for dropout, so that a model that draws random numbers can be compared at all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from meshwright.assemble.batch import MicroBatch, Share, Span, part
from meshwright.assemble.batchnorm import take_over_synchronised
from meshwright.assemble.passes import Dropout
from meshwright.describe.dropout import NoDropout, switch_dropout_off
from meshwright.describe.observe import call_loss, call_model, make_batch
from meshwright.describe.samples import Cutter, own_random_numbers
from meshwright.describe.structure import to_device
from meshwright.errors import JobError, MeshwrightError, one_line
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.lr_schedule import STEP, advance
from meshwright.recording.seeding import seed_torch
from meshwright.verify.evidence import Evidence, gradients_of, kept_of, outputs_of, state_of


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A disturbance of the size of rounding."""

    seed: int
    by: float
    """The largest relative change of a weight."""
    backwards: bool = False
    """Whether to reverse the samples of every batch."""


Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of the plain loop."""

    steps: int
    seed: int
    device: torch.device
    micro_batch: int | None = None
    """Samples in one forward pass, which matters under BatchNorm and for dropout's masks."""
    dropout: bool = False
    arithmetic: Around = field(default=nullcontext)
    """Context of each step."""
    watch: Around = field(default=nullcontext)
    """Context of forward, loss and backward."""
    autocast: torch.dtype | None = None
    """The dtype of `torch.autocast` around forward and loss."""
    disturbed: Perturbation | None = None
    """Applied before every step."""
    reseed: int = 0
    """Added to the seed of each step's random numbers."""

    def lowered(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)


def train_plainly(job: Job, recipe: Recipe) -> Evidence:
    """Take a few steps and return their results. A failure here is the job's: Meshwright takes no part."""
    try:
        return _train(job, recipe)
    except MeshwrightError:
        raise
    except Exception as error:
        raise JobError(
            f"The job does not train in plain PyTorch, in one process and without Meshwright: {one_line(error)} "
            "Run its model, loss and optimizer in a plain loop to find out why."
        ) from error


def build_plainly(job: Job, recipe: Recipe) -> nn.Module:
    """The model that the user's builder makes from the seed, ready to train."""
    seed_generators(recipe.seed)
    model = job.model().to(recipe.device).train()
    if recipe.device.type == "cpu":
        take_over_synchronised(model)  # SyncBatchNorm refuses CPU tensors; in one process BatchNorm is the same
    if not recipe.dropout:
        switch_dropout_off(model)
    return model


def _train(job: Job, recipe: Recipe) -> Evidence:
    model = build_plainly(job, recipe)
    optimizer = job.optimizer(NamedParameters((n, p) for n, p in model.named_parameters() if p.requires_grad))
    schedule = job.schedule(optimizer) if job.schedule is not None else None
    trace = Evidence(losses=[], norms=[])
    for step in range(recipe.steps):
        if (disturbed := recipe.disturbed) is not None:
            move_weights(model.parameters(), disturbed.seed * recipe.steps + step, disturbed.by)
        if step == 0:
            trace.start.update(state_of(model))
            trace.kept.update(kept_of(model))
        batch = step_batch(job, recipe, step)
        optimizer.zero_grad()
        with recipe.arithmetic(), nullcontext() if recipe.dropout else NoDropout():
            trace.losses.append(forward_backward(job, model, batch, recipe, step, trace.outputs))
            _note_gradients(model, trace, step)
            _call_hook(job, model)
            trace.norms.append(_clip(model, job.max_norm))
            optimizer.step()
        if schedule is not None and job.schedule_by == STEP:  # made-up batches have no epochs
            advance(schedule, updates=step + 1, loss=lambda: trace.losses[-1])
        if step == 0:
            trace.first.update(state_of(model))
    trace.last.update(state_of(model))
    return trace


def step_batch(job: Job, recipe: Recipe, step: int) -> Any:
    batch = seeded_batch(job, recipe.seed + step)
    backwards = recipe.disturbed is not None and recipe.disturbed.backwards
    return to_device(Cutter(job).turned(batch) if backwards else batch, recipe.device)


def forward_backward(
    job: Job, model: nn.Module, batch: Any, recipe: Recipe, step: int, outputs: list[list[torch.Tensor]]
) -> float:
    """Compute gradients of the mean loss, and return the loss; `outputs` gets the model's outputs of the first step."""
    sums, weights, pieces = [], [], _pieces(job, batch, recipe)
    for piece in pieces:
        seed_step(recipe, step, piece.span.first)
        with recipe.watch():
            with recipe.lowered():
                output = call_model(job, model, piece.data)
                total, weight = call_loss(job, output, piece.data)
            (total / weight if len(pieces) == 1 else total).backward()
        sums.append(float(total.detach()))
        weights.append(float(weight))
        if step == 0:
            outputs.append(outputs_of(output))
    if len(pieces) > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= math.fsum(weights)
    return math.fsum(sums) / math.fsum(weights)


def _pieces(job: Job, batch: Any, recipe: Recipe) -> list[MicroBatch]:
    if recipe.micro_batch is None:
        return [MicroBatch(data=batch, span=Span(0, job.global_batch))]
    return part(batch, Share(micro_batch=recipe.micro_batch), Cutter(job), nominal=job.global_batch).pieces


def seed_step(recipe: Recipe, step: int, first: int = 0) -> None:
    """Seed torch by the rule for dropout's masks, and also Python's and numpy's generators."""
    seed_generators(recipe.seed + step + recipe.reseed)
    Dropout(run_seed=recipe.seed + recipe.reseed, device=recipe.device).seed(step, first)


def _note_gradients(model: nn.Module, trace: Evidence, step: int) -> None:
    gradients = gradients_of(model)
    if step == 0:
        trace.gradients = gradients
    for name, gradient in gradients.items():
        size = gradient.abs()
        trace.smallest[name] = torch.minimum(trace.smallest[name], size) if name in trace.smallest else size


@torch.no_grad()
def _call_hook(job: Job, model: nn.Module) -> None:
    if job.on_gradient is None:
        return
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (found := job.on_gradient(name, parameter.grad)) is not None:
            parameter.grad = found


def _clip(model: nn.Module, max_norm: float | None) -> float:
    """Clip, and return the norm before it in float64: on CPUs torch's norm loses digits over large tensors."""
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return math.sqrt(math.fsum(squares))


@torch.no_grad()
def move_weights(parameters: Iterable[nn.Parameter], seed: int, by: float) -> None:
    """Change each weight randomly by up to `by` of itself, in float64: its dtype would round most of that away."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.copy_(parameter.double() * (1 + by * noise.to(parameter.device)))


def seeded_batch(job: Job, seed: int) -> Any:
    """A global batch of synthetic samples, the same on every rank."""
    with own_random_numbers(seed):
        return make_batch(job, job.global_batch)


def seed_generators(seed: int) -> None:
    """Seed the generators of PyTorch, Python and numpy."""
    seed_torch(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
