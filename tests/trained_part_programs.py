"""A run whose checkpoints hold the trained part alone, on real ranks."""

from __future__ import annotations

from dataclasses import replace

from meshwright.assemble.world import World, alone
from meshwright.runtime.run import Run, setup
from moving_jobs import batch_of, job

trained_job = replace(job, save="trained")


def train_and_save(world: World, strategy: str, folder: str) -> list[float]:
    """Saves after two steps, and goes on."""
    run = setup(trained_job, strategy, world=world, device="cpu")
    before = [run.step(batch_of(step)).loss for step in range(2)]
    run.save(folder)
    return before + steps_from(run)


def load_and_train(world: World, strategy: str, folder: str) -> list[float]:
    run = setup(trained_job, strategy, world=world, device="cpu")
    run.load(folder)
    return steps_from(run)


def steps_from(run: Run) -> list[float]:
    return [run.step(batch_of(step)).loss for step in range(2, 5)]


def in_one_process(folder: str) -> list[float]:
    import torch

    return load_and_train(alone(torch.device("cpu")), "single", folder)
