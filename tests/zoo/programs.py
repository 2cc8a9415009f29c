"""A model of the zoo under a strategy: what runs in one process, and what runs on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from meshwright import Job, Strategy
from meshwright.build.check import check
from meshwright.build.rehearsal import rehearse
from meshwright.build.step import Trainer
from meshwright.build.world import World
from meshwright.errors import BadInput, MeshwrightError, one_line
from meshwright.facts.model import ModelFacts
from meshwright.runtime.place import place_for, place_of
from rank_pool import RankError, RankPool
from zoo.judge import STEPS, Course, batch_of, first_difference, for_gradients, to_numpy, unsaved_tensors


def refuse(job: Job, facts: ModelFacts, strategy: str, ranks: int) -> None:
    """Raise what a user is told before any process starts."""
    rehearse(job, facts, check(job, facts, Strategy.parse(strategy), place_for("cpu", ranks)))


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
    return found


def on_ranks(world: World, name: str, facts: dict[str, Any], strategy: str) -> Course:
    """Every rank looks the job up by its name. Rank 0 has what they found; all have their own unsaved tensors."""
    from zoo.catalogue import job_of

    found = course(world, job_of(name), ModelFacts.from_json(facts), strategy)
    return found if world.is_main else Course(unsaved=found.unsaved)


@dataclass(frozen=True)
class Outcome:
    """What became of a model under a strategy."""

    verdict: str
    """equal, refused, DIFFERS or CRASH."""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def examine(name: str, strategy: str, pool: RankPool | None) -> Outcome:
    """Compare a strategy with plain PyTorch; `single` runs here, the others on the pool's ranks."""
    from zoo.catalogue import ZOO, facts_of, job_of, plain_of

    try:
        job, facts = job_of(name), facts_of(name)
        refuse(job, facts, strategy, pool.ranks if pool else 1)
        if pool is None:
            found = [course(World(device=torch.device("cpu")), job, facts, strategy)]
        else:
            found = pool(on_ranks, name, facts.to_json(), strategy)
    except MeshwrightError as error:
        return Outcome("refused", str(error))
    except RankError as error:
        return Outcome("refused" if error.kind in REFUSALS else "CRASH", f"{error.kind}: {error.message}")
    except Exception as error:
        return Outcome("CRASH", one_line(error))
    for other in found[1:]:
        found[0].unsaved = other.unsaved | found[0].unsaved
    difference = first_difference(plain_of(name), found[0], double=ZOO[name].double)
    return Outcome("DIFFERS", difference) if difference else Outcome("equal")


def _kinds(root: type[MeshwrightError]) -> Iterator[str]:
    yield root.__name__
    for kind in root.__subclasses__():
        yield from _kinds(kind)


REFUSALS = frozenset(_kinds(BadInput))
