"""All models of the zoo."""

from __future__ import annotations

from functools import cache

from meshwright import Job
from meshwright.describe.model import describe
from meshwright.facts.model import ModelFacts
from zoo import batches, builders, forwards, layers, losses, optimizers, recurrent, state, vision
from zoo.jobs import FOUR_RANKS, STRATEGIES, ZOO, Entry
from zoo.judge import Course, in_double, plain_course

__all__ = ["FAMILIES", "STRATEGIES", "ZOO", "Entry", "facts_of", "job_of", "plain_of", "ranks_of"]

FAMILIES = (layers, vision, recurrent, builders, forwards, state, batches, losses, optimizers)


@cache
def job_of(name: str) -> Job:
    entry = ZOO[name]
    return in_double(entry.make()) if entry.double else entry.make()


@cache
def facts_of(name: str) -> ModelFacts:
    return describe(job_of(name))


@cache
def plain_of(name: str) -> Course:
    return plain_course(job_of(name))


def ranks_of(strategy: str) -> int:
    return 4 if strategy in FOUR_RANKS else 2
