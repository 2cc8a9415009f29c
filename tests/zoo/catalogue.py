"""All models of the zoo."""

from __future__ import annotations

from meshwright import Job
from zoo import batches, builders, forwards, layers, losses, optimizers, recurrent, state, vision
from zoo.jobs import FOUR_RANKS, STRATEGIES, ZOO, Entry
from zoo.programs import Case

__all__ = ["FAMILIES", "STRATEGIES", "ZOO", "Entry", "case_of", "find_job", "ranks_of"]

FAMILIES = (layers, vision, recurrent, builders, forwards, state, batches, losses, optimizers)


def find_job(name: str) -> Job:
    return ZOO[name].make()


def case_of(name: str) -> Case:
    return Case("zoo.catalogue", name, double=ZOO[name].double)


def ranks_of(strategy: str) -> int:
    return 4 if strategy in FOUR_RANKS else 2
