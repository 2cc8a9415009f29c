"""What rank 0 found out, for all ranks and all later calls: looking at a model takes longer than most steps of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from meshwright.assemble.world import World
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.verify.references import LocalReferences

_FOUND: dict[Hashable, Any] = {}


def facts_of(world: World, job: Job) -> ModelFacts:
    found: ModelFacts = found_once(world, job, lambda: describe(job))
    return found


def found_once(world: World, key: Hashable, find: Callable[[], Any]) -> Any:
    """All ranks ask, in the same order: the first time rank 0 finds it and tells the others."""
    if key not in _FOUND:
        _FOUND[key] = world.gather(find() if world.is_main else None)[0]
    return _FOUND[key]


def references_of(world: World, job: Job) -> LocalReferences:
    """What the job's strategies are compared with, kept for later calls: rank 0 makes each when it is first asked."""
    key = ("references", id(job))
    if key not in _FOUND:
        _FOUND[key] = LocalReferences(job, facts_of(world, job), world.device, steps=3, seed=0)
    found: LocalReferences = _FOUND[key]
    return found
