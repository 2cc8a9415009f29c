"""Train a job that was written from a script."""

from pathlib import Path

from meshwright.assemble.world import World
from meshwright.jobs.load import load_job
from meshwright.runtime.run import setup


def adopted_losses(world: World | None, path: Path, strategy: str, steps: int) -> list[float]:
    """The losses of the first steps from seed 0, on a rank of the pool or, without a world, alone."""
    run = setup(load_job(str(path)), strategy, seed=0, world=world, device="cpu")
    return [float(run.step(batch).loss) for batch in run.batches(steps=steps)]
