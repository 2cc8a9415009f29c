"""What tests of pipelines run on real ranks: functions of (world, ...) that `RankPool` can send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import pipeline_jobs
from meshwright.assemble.check import check
from meshwright.assemble.pipeline import PipelinePasses
from meshwright.assemble.rank_engine import RankEngine
from meshwright.assemble.stage_model import StageModel
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.runtime.measure import held_states
from meshwright.runtime.place import place_of
from meshwright.verify.plain_training import seeded_batch
from meshwright.verify.verdict import Verdict
from meshwright.verify.verify import verify
from shared_facts import facts_of, references_of


def verdicts(world: World, job: str, strategies: list[str], defect: str | None = None) -> list[Verdict]:
    """Verify one of the small jobs, perhaps with a planted defect."""
    chosen: Job = getattr(pipeline_jobs, job)
    facts = facts_of(world, chosen)
    references = references_of(world, chosen)
    with DEFECTS[defect]() if defect else nullcontext():
        return list(verify(chosen, facts, strategies, world, references=references))


def trainer(world: World, job: Job, strategy: str) -> Trainer:
    facts = facts_of(world, job)
    return Trainer(job, facts, check(job, facts, Strategy.parse(strategy), place_of(world)), world, seed=0)


def alone(job: Job) -> Trainer:
    """What a strategy is compared with."""
    world = World(device=torch.device("cpu"))
    return Trainer(job, facts_of(world, job), Strategy.parse("single"), world, seed=0)


Numbers = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def steps_of_sizes(world: World, job: str, strategy: str, sizes: list[int]) -> tuple[Numbers, Numbers]:
    """Steps over batches of other sizes than the job's, under a strategy and in one process."""
    chosen: Job = getattr(pipeline_jobs, job)
    batches = [seeded_batch(replace(chosen, global_batch=size), seed) for seed, size in enumerate(sizes)]
    return tuple(  # type: ignore[return-value]
        [(result.loss, result.grad_norm) for result in map(made.step, batches)]
        for made in (trainer(world, chosen, strategy), alone(chosen))
    )


def evaluations(world: World, job: str, strategy: str, sizes: list[int]) -> tuple[list[float], list[float]]:
    """Mean losses before, between and after steps, under a strategy and in one process."""
    chosen: Job = getattr(pipeline_jobs, job)
    held_out = [seeded_batch(replace(chosen, global_batch=size), 100 + size) for size in sizes]
    found = []
    for made in (trainer(world, chosen, strategy), alone(chosen)):
        losses = [made.evaluate(held_out)]
        for seed in range(2):
            made.step(seeded_batch(chosen, seed))
            losses.append(made.evaluate(held_out))
        found.append(losses)
    return found[0], found[1]


def results_and_state(world: World, job: str, strategy: str) -> tuple[Numbers, dict[str, torch.Tensor], list[str]]:
    """What two steps gave, the state after them, and the names that the state of the unsplit model has."""
    chosen: Job = getattr(pipeline_jobs, job)
    made = trainer(world, chosen, strategy)
    results = [made.step(seeded_batch(chosen, seed)) for seed in range(2)]
    state = {name: tensor.clone() for name, tensor in made.engine.state()}
    return [(r.loss, r.grad_norm) for r in results], state, list(chosen.model().state_dict())


def fickle_error(world: World) -> str:
    """What a model that calls other modules for a small batch is told."""
    made = trainer(world, pipeline_jobs.fickle, "pp=2:gpipe")
    made.step(seeded_batch(made.job, 0))
    try:
        made.step(seeded_batch(replace(made.job, global_batch=4), 0))
    except JobError as error:
        return str(error)
    return ""


def splits(world: World, job: str, strategy: str) -> dict[int, bool | None]:
    """By stage, whether its backward pass was split; None where nobody asked."""
    made = trainer(world, getattr(pipeline_jobs, job), strategy)
    made.step(seeded_batch(made.job, 0))
    assert isinstance(made.passes, PipelinePasses)
    stages = [stage for schedule in made.passes._schedules.values() for stage in schedule._stages]
    return {stage.stage_index: stage.splits for stage in stages}


def held_parameters(world: World, job: str, strategy: str) -> int:
    """Bytes of parameters on this rank."""
    return held_states(trainer(world, getattr(pipeline_jobs, job), strategy)).memory["parameters"]


@contextmanager
def unshared() -> Iterator[None]:
    """Gradients of tied parameters stay on their stages."""
    with patch.object(RankEngine, "_sum_shared", lambda self, name, group: None):
        yield


@contextmanager
def unlearned() -> Iterator[None]:
    """What a stage receives does not get a true gradient: the stages before it learn nothing."""
    run = StageModel.run

    def deaf(self: StageModel, flow: Any, crossings: Any, received: Any, forward: Callable[[], Any]) -> Any:
        silent = tuple(tensor.detach() + 0 * tensor for tensor in received)
        return run(self, flow, crossings, silent, forward)

    with patch.object(StageModel, "run", deaf):
        yield


@contextmanager
def alone_in_the_norm() -> Iterator[None]:
    """Each rank of the pipeline counts its own stages only."""
    norm = RankEngine.norm

    def own(self: RankEngine, parameters: Any) -> torch.Tensor:
        axes, self.axes = self.axes, replace(self.axes, stage_name="")
        try:
            return norm(self, parameters)
        finally:
            self.axes = axes

    with patch.object(RankEngine, "norm", own):
        yield


DEFECTS: dict[str, Callable[[], Any]] = {
    "unshared": unshared,
    "unlearned": unlearned,
    "norm": alone_in_the_norm,
}
