"""What ranks do with the jobs of `script_jobs`: train as `meshwright train` does, and tell what came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.assemble.world import World
from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.manifest import EMA
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.facts.model import ModelFacts
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.run import setup
from meshwright.runtime.summary import Summary
from meshwright.runtime.train import train
from script_jobs import JOBS


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    summary: Summary
    weights: dict[str, torch.Tensor]


def train_script(
    world: World,
    job: str,
    facts: ModelFacts,
    strategy: str,
    out: str,
    steps: int | None = None,
    epochs: int | None = None,
    every: int = 0,
    resume: bool = False,
) -> Trained:
    """Train into a folder, or go on with what is there."""
    made = JOBS[job]()
    torch.manual_seed(world.rank)
    run = setup(made, strategy, facts=facts, world=world)
    checkpoints = Checkpoints(run, Path(out), every=every)
    if resume:
        checkpoints.resume()
    summary = train(run, steps=steps, epochs=epochs, out=Path(out), checkpoints=checkpoints, progress=False)
    return Trained(summary, run.state())


def evaluations(out: Path) -> list[dict[str, Any]]:
    """The records of evaluations, without their times."""
    lines = (out / "evaluations.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "records.jsonl").read_text().splitlines()]


def averages(out: Path) -> dict[str, torch.Tensor]:
    """The averaged weights in a run's last checkpoint, whole."""
    tensors = WholeTensors(find_checkpoint(out))
    keys = [key for key in tensors.manifest.tensors if key.startswith(EMA)]
    return {key.removeprefix(EMA): tensors.read(key).clone() for key in keys}
