"""What rank 0 found out, for all ranks and all later calls: looking at a model takes longer than most steps of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from meshwright.build.world import World
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts

_FOUND: dict[Hashable, Any] = {}


def facts_of(world: World, job: Job) -> ModelFacts:
    found: ModelFacts = found_once(world, job, lambda: describe(job))
    return found


def found_once(world: World, key: Hashable, find: Callable[[], Any]) -> Any:
    """All ranks ask, in the same order: the first time rank 0 finds it and tells the others."""
    if key not in _FOUND:
        _FOUND[key] = world.gather(find() if world.is_main else None)[0]
    return _FOUND[key]
