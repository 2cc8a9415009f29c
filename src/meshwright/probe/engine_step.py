"""Time the engine's own part of a step: one of a model with a single weight."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.optim import SGD

from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.runtime.profile_step import synchronize

STEPS = 30
Clock = Callable[[], float]


def engine_step_seconds(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds of a step that computes almost nothing: the loop, the loss, the norm and the optimizer's start."""
    job = Job(
        model=lambda: nn.Linear(1, 1, bias=False),
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda parameters: SGD(parameters, lr=1e-3),
        sample=lambda count: {"x": torch.ones(count, 1)},
        global_batch=1,
        max_norm=1.0,
    )
    trainer = Trainer(job, describe(job), Strategy.parse("single").resolve(1), World(device=device), seed=0)
    batch = {"x": torch.ones(1, 1, device=device)}
    return median(_step(trainer, batch, device, clock) for _ in range(STEPS))


def _step(trainer: Trainer, batch: dict[str, torch.Tensor], device: torch.device, clock: Clock) -> float:
    synchronize(device)
    start = clock()
    trainer.step(batch)
    synchronize(device)
    return clock() - start
