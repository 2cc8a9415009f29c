"""A model of the zoo under a strategy: what runs in one process, and what runs on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from meshwright import Job, Strategy
from meshwright.assemble.check import check
from meshwright.assemble.dry_run import dry_run
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.errors import BadInput, MeshwrightError, one_line
from meshwright.facts.model import ModelFacts
from meshwright.runtime.place import place_for, place_of
from rank_pool import RankError, RankPool
from zoo.judge import (
    STEPS,
    Course,
    batch_of,
    first_difference,
    for_gradients,
    in_double,
    plain_course,
    to_numpy,
    unsaved_tensors,
)


def refuse(job: Job, facts: ModelFacts, strategy: str, ranks: int) -> None:
    """Raise what a user is told before any process starts."""
    dry_run(job, facts, check(job, facts, Strategy.parse(strategy), place_for("cpu", ranks)))


def course(world: World, job: Job, facts: ModelFacts, strategy: str, *, steps: int = STEPS) -> Course:
    """The same training under a strategy, by all ranks together."""
    resolved = check(job, facts, Strategy.parse(strategy), place_of(world))
    found = Course()
    trainer = Trainer(for_gradients(job), facts, resolved, world, seed=0)
    found.start = to_numpy(trainer.engine.state())
    trainer.step(batch_of(job, 0))
    after = to_numpy(trainer.engine.state())
    trainable = {name for name, p in found.start.items() if p.dtype.kind in "fc"}
    found.gradients = {name: found.start[name] - after[name] for name in trainable if name in after}
    trainer = Trainer(job, facts, resolved, world, seed=0)
    found.unsaved = to_numpy(unsaved_tensors(trainer.engine.model))
    found.losses = [trainer.step(batch_of(job, step)).loss for step in range(steps)]
    found.end = to_numpy(trainer.engine.state())
    found.held = sum(parameter.numel() for parameter in trainer.engine.parameters())
    return found


def on_ranks(world: World, case: Case, facts: dict[str, Any], strategy: str) -> Course | Outcome:
    """Rank 0 has what all found; each has its own unsaved tensors.

    A refusal is raised alike on all of them, but for one that an error of this rank has caused.
    """
    try:
        found = course(world, job_of(case), ModelFacts.from_json(facts), strategy)
    except BadInput as error:
        if error.__cause__ is not None:
            raise
        return Outcome("refused", str(error))
    return found if world.is_main else Course(unsaved=found.unsaved, held=found.held)


@dataclass(frozen=True)
class Case:
    """A job by where it is found, which every rank looks up for itself."""

    module: str
    """Its function `find_job` takes the name."""
    name: str
    double: bool = True
    """Whether it is run in float64."""
    exact: bool = True
    """Whether nothing inside computes in float32 whatever the model's dtype."""


@cache
def job_of(case: Case) -> Job:
    job: Job = import_module(case.module).find_job(case.name)
    return in_double(job) if case.double else job


@cache
def facts_of(case: Case) -> ModelFacts:
    return describe(job_of(case))


@cache
def plain_of(case: Case) -> Course:
    return plain_course(job_of(case))


@dataclass(frozen=True)
class Outcome:
    """What became of a model under a strategy."""

    verdict: str
    """equal, refused, DIFFERS or CRASH."""
    reason: str = ""
    held: float | None = None
    """The largest share of the trainable parameters that a rank updates."""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def examine(case: Case, strategy: str, pool: RankPool | None) -> Outcome:
    """Compare a strategy with plain PyTorch; `single` runs here, the others on the pool's ranks."""
    try:
        job, facts = job_of(case), facts_of(case)
        refuse(job, facts, strategy, pool.ranks if pool else 1)
        if pool is None:
            found = [course(World(device=torch.device("cpu")), job, facts, strategy)]
        else:
            found = pool(on_ranks, case, facts.to_json(), strategy)
    except MeshwrightError as error:
        return Outcome("refused", str(error))
    except RankError as error:
        message = next((line for line in error.message.splitlines() if line.strip()), "")
        return Outcome("refused" if is_refusal(error.kind) else "CRASH", f"{error.kind}: {message.strip()}")
    except Exception as error:
        return Outcome("CRASH", one_line(error))
    first, *others = found
    if isinstance(first, Outcome):
        return first
    for other in others:
        first.unsaved = other.unsaved | first.unsaved
    difference = first_difference(plain_of(case), first, double=case.double and case.exact)
    held = max(one.held for one in found) / max(1, sum(p.count for p in facts.trainable))
    return Outcome("DIFFERS", difference) if difference else Outcome("equal", held=round(held, 3))


def is_refusal(kind: str, root: type[BadInput] = BadInput) -> bool:
    """Whether a class of errors is one of those by which things are refused."""
    return kind == root.__name__ or any(is_refusal(kind, child) for child in root.__subclasses__())
