"""What ranks do in tests of runs that are taken up again, and of what is exported from them."""

from __future__ import annotations

from pathlib import Path

import torch

import checkpoint_programs as programs
import tiny_jobs
from checkpoint_programs import Setup
from meshwright.assemble.world import World
from meshwright.jobs.load import load_job
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.run import setup
from meshwright.runtime.train import train
from meshwright.verify.plain_training import seeded_batch


def resume_and_save(world: World, context: Setup, source: str, steps: int, target: str) -> None:
    """In a new run."""
    run = programs.make_run(world, context)
    run.load(source)
    programs.take_steps(run, steps)
    run.save(target)


def train_hugging_face(world: World, strategy: str, steps: int, target: str) -> dict[str, torch.Tensor]:
    """Returns the state as one process would hold it."""
    run = setup(tiny_jobs.hf_gpt2, strategy, world=world)
    for step in range(steps):
        run.step(seeded_batch(tiny_jobs.hf_gpt2, step))
    run.save(target)
    return run.state()


def train_undisturbed(world: World, job: str, strategy: str, steps: int, every: int, out: str) -> None:
    """Train a job into a folder as the ranks of `meshwright train` do."""
    run = setup(load_job(job), strategy, world=world)  # not left at the end: the pool keeps its group
    train(run, steps=steps, out=Path(out), checkpoints=Checkpoints(run, Path(out), every=every), progress=False)
