"""What ranks do with the jobs of `script_jobs`: train as `meshwright train` does, and tell what came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.assemble.world import World
from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.manifest import EMA
from meshwright.checkpoint.whole_tensors import WholeTensors
from meshwright.errors import JobError, Refused
from meshwright.facts.model import ModelFacts
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.run import setup
from meshwright.runtime.summary import Summary
from meshwright.runtime.train import train
from script_jobs import JOBS, MEASURED, script_job


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


def measured(world: World, job: str, facts: ModelFacts, strategies: list[str]) -> list[dict[str, float]]:
    """What is measured before the first step under each strategy."""
    return [setup(MEASURED[job](), strategy, facts=facts, world=world).measure() for strategy in strategies]


def failure(world: World, facts: ModelFacts, strategy: str, how: str) -> str:
    """What a run says that fails on the last rank alone; all ranks must say the same."""

    def on_last_rank(*arguments: Any) -> Any:
        if world.rank == world.ranks - 1:
            raise ValueError("on this rank alone")
        return 0.0, 1.0

    job = script_job()
    if how == "metric":
        assert job.evaluation is not None
        job = replace(job, evaluation=replace(job.evaluation, metrics={"odd": on_last_rank}), early_stop=None)
    else:
        job = replace(job, **{how: on_last_rank})
    try:
        train(setup(job, strategy, facts=facts, world=world), steps=5, progress=False)
    except JobError as error:
        return str(error)
    return "nothing"


def steps_until_asked(world: World, facts: ModelFacts, strategy: str) -> tuple[int, str | None]:
    """The steps of a run whose last rank has seen enough after the second."""
    job = script_job(on_step=lambda event: world.rank == world.ranks - 1 and event.step == 2)
    summary = train(setup(job, strategy, facts=facts, world=world), steps=6, progress=False)
    return summary.steps, summary.stopped


def refusal(world: World, facts: ModelFacts, strategy: str, hook: str) -> str:
    """Why a hook on gradients is refused; empty if it runs."""
    try:
        run = setup(script_job(on_gradient=HOOKS[hook]), strategy, facts=facts, world=world)
    except Refused as error:
        return str(error)
    for batch in run.batches(steps=1):
        run.step(batch)
    sums = world.gather({name: float(tensor.double().sum()) for name, tensor in run.state().items()})
    assert all(found == sums[0] for found in sums), "ranks differ"
    return ""


def _first_row_stays(name: str, gradient: torch.Tensor) -> None:
    if gradient.dim() == 2:
        gradient[0] = 0.0


HOOKS: dict[str, Any] = {
    "norm": lambda name, gradient: gradient / (gradient.norm() + 1e-6),
    "row": _first_row_stays,
    "noise": lambda name, gradient: gradient + torch.randn_like(gradient),
    "sign": lambda name, gradient: gradient.sign(),
    "shape": lambda name, gradient: gradient[:1],
}


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
