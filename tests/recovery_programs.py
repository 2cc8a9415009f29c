"""What ranks do in tests of runs that are taken up again, and of what is exported from them."""

from __future__ import annotations

import torch

import checkpoint_programs as programs
import tiny_jobs
from checkpoint_programs import Setup
from meshwright.assemble.world import World
from meshwright.runtime.run import setup
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
