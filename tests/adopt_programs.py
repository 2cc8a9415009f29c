"""Train a job that was written from a script."""

from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.jobs.load import load_job


def adopted_losses(world: Any, path: Path, strategy: str, steps: int) -> list[float]:
    """The losses of the first steps from seed 0, alone or on a rank of the pool."""
    with mw.setup(load_job(str(path)), strategy, seed=0, device="cpu", **({"world": world} if world else {})) as run:
        return [float(run.step(batch).loss) for batch in run.batches(steps=steps)]
