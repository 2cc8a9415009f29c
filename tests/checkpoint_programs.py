"""What ranks do with checkpoints in tests: train, save, load under another strategy, train on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch.optim import AdamW

import tiny_jobs
from meshwright import Job
from meshwright.build.world import World
from meshwright.describe.jobfile import load_job
from meshwright.describe.model import describe
from meshwright.facts.model import ModelFacts
from meshwright.runtime.run import Run, setup

EXAMPLES = Path(__file__).parents[1] / "examples"
BEFORE = AFTER = 3


@cache
def job_of(name: str) -> tuple[Job, ModelFacts]:
    """A job by the name of its example, or of a tiny one."""
    if not (EXAMPLES / f"{name}.py").exists():
        job: Job = getattr(tiny_jobs, name)
        return job, describe(job)
    job = load_job(str(EXAMPLES / f"{name}.py"))
    if name == "gpt":
        # Where a gradient is all rounding (the key's bias), Adam's usual eps turns the rounding into a whole step.
        job = replace(job, optimizer=lambda params: AdamW(params, lr=2e-3, betas=(0.9, 0.95), eps=1e-4))
    return job, describe(job)


def make_run(world: World, name: str, strategy: str) -> Run:
    job, facts = job_of(name)
    torch.manual_seed(world.rank)  # whatever state the pool's generators are in: each test begins alike
    return setup(job, strategy, facts=facts, world=world)


def train_and_save(world: World, name: str, strategy: str, targets: list[str], steps: int = BEFORE) -> list[float]:
    """Train and save `steps` steps for every target."""
    run = make_run(world, name, strategy)
    losses = []
    for target in targets:
        for batch in run.batches(steps=steps):
            losses.append(run.step(batch).loss)
        run.save(target)
    return losses


def go_on(
    world: World, name: str, strategy: str, sources: list[str], again: list[str], after: list[str]
) -> list[list[float]]:
    """From each checkpoint: save it again at once, train on, save what came of it. Returns the losses."""
    run = make_run(world, name, strategy)
    losses = []
    for source, copy, end in zip(sources, again, after, strict=True):
        run.load(source)
        run.save(copy)
        losses.append([run.step(batch).loss for batch in run.batches(steps=AFTER)])
        run.save(end)
    return losses
