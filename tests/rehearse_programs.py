"""What tests of rehearsals run on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.assemble.check import check
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job
from meshwright.rehearse.meter import StorageMeter
from meshwright.rehearse.rank import measure_steps, own_part, plan_steps
from meshwright.runtime.place import place_of


def counted(world: World, job: str, facts: ModelFacts, strategies: list[str], batch: int) -> list[dict[str, Any]]:
    """For each strategy, what a real rank holds at the peak of its second step, in bytes by cause."""
    loaded = replace(load_job(job), global_batch=batch)
    return [_counted(world, loaded, facts, strategy) for strategy in strategies]


def _counted(world: World, job: Job, facts: ModelFacts, strategy: str) -> dict[str, Any]:
    meter = StorageMeter(None)
    with meter.counting():
        resolved = check(job, facts, Strategy.parse(strategy), place_of(world))
        trainer = Trainer(job, facts, resolved, world, seed=0)
        measure_steps(trainer, own_part(job, trainer, plan_steps(job, trainer).counts[0]), meter)
    return {"peak": meter.peak().allocated, "memory": dict(meter.peak().memory)}
