"""What tests of models with habits run on real ranks."""

from __future__ import annotations

from typing import Any

import torch

import habit_jobs
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.errors import Refused
from meshwright.runtime.run import setup
from meshwright.verify.plain_training import seeded_batch
from meshwright.verify.verdict import Verdict
from meshwright.verify.verify import verify
from rank_programs import trainer
from shared_facts import facts_of


def train(world: World, job: str, strategy: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]] | str:
    """The loss of each step, and the whole state after the last; or why the strategy is refused."""
    try:
        made: Trainer = trainer(world, getattr(habit_jobs, job), strategy)
    except Refused as refusal:
        return str(refusal)
    losses = [made.step(batch).loss for batch in batches(made.job, steps)]
    return losses, {name: tensor.detach().clone() for name, tensor in made.engine.state()}


def batches(job: Any, steps: int) -> list[Any]:
    return [seeded_batch(job, seed) for seed in range(steps)]


def train_on(world: World, job: str, first: str, second: str, steps: int, folder: str) -> Any:
    """Half of the steps under one strategy, the other half under another one that loads what was saved."""
    chosen = getattr(habit_jobs, job)
    facts, given, losses = facts_of(world, chosen), batches(chosen, steps), []
    for number, strategy in enumerate((first, second)):
        run = setup(chosen, strategy, facts=facts, world=world)
        if number:
            run.load(folder)
        losses += [run.step(batch).loss for batch in given[number * steps // 2 : (number + 1) * steps // 2]]
        if not number:
            run.save(folder)
    return losses, {name: tensor.detach().clone() for name, tensor in run.trainer.engine.state()}


def verdicts(world: World, job: str, strategies: list[str]) -> list[Verdict]:
    chosen = getattr(habit_jobs, job)
    return list(verify(chosen, facts_of(world, chosen), strategies, world))
