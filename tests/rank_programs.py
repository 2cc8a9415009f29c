"""What tests run on real ranks: functions of (world, ...) that `RankPool` can send."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import any_batch_jobs
import builder_habits
import contrastive_jobs
import tiny_jobs
from meshwright.assemble import float8
from meshwright.assemble.check import check
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.environment import programs_wanted
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.jobs.decoder import Shape, decoder_job
from meshwright.runtime.measure import held_states
from meshwright.runtime.place import place_of
from meshwright.runtime.run import Run
from meshwright.strategies import gather_whole
from meshwright.strategies.float8_linear import float8_linear
from meshwright.strategies.tensor.replay import program_state, recording
from meshwright.verify.plain_training import seeded_batch
from meshwright.verify.strategy_steps import whole_gradients
from meshwright.verify.verdict import Verdict
from meshwright.verify.verify import verify
from promised_states import promised_states
from shared_facts import facts_of, references_of


def verdicts(world: World, job: str, strategies: list[str], plant: str | None = None) -> list[Verdict]:
    """Verify one of the tiny jobs, perhaps with a planted defect."""
    chosen = getattr(tiny_jobs, job)
    spoil = PLANTS[plant] if plant else None
    references = references_of(world, chosen)
    return list(verify(chosen, facts_of(world, chosen), strategies, world, plant=spoil, references=references))


def verdicts_in_float8(world: World, strategies: list[str], plant: str | None = None) -> list[Verdict]:
    """Verify the transformer with float8 in its small layers, too."""
    with patch.object(float8, "SMALLEST", 1):
        return verdicts(world, "transformer", strategies, plant)


def verdicts_on(world: World, samples: int, strategies: list[str]) -> list[Verdict]:
    """Verify the transformer with another global batch."""
    job = replace(tiny_jobs.transformer, global_batch=samples)
    return list(verify(job, facts_of(world, job), strategies, world, references=references_of(world, job)))


def trainer(world: World, job: Job, strategy: str, seed: int = 0) -> Trainer:
    facts = facts_of(world, job)
    return Trainer(job, facts, check(job, facts, Strategy.parse(strategy), place_of(world)), world, seed=seed)


def initial_weights(world: World, job: str, strategy: str, seed: int) -> dict[str, torch.Tensor]:
    made = trainer(world, getattr(tiny_jobs, job), strategy, seed)
    return {name: tensor.clone() for name, tensor in made.engine.state()}


def filled(world: World, model: str, strategy: str) -> dict[str, torch.Tensor]:
    """What this rank's model starts from, whole: parameters, all buffers, and tensors in plain attributes."""
    job = replace(tiny_jobs.transformer, model=getattr(builder_habits, model))
    made = trainer(world, job, strategy, seed=11)
    found = {name: tensor.clone() for name, tensor in made.engine.state()}
    found |= {name: tensor.clone() for name, tensor in made.engine.model.named_buffers()}
    return found | {"shift": made.engine.model.shift.clone()}


def states(world: World, strategy: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this rank holds after a backward pass and a first update, and what the strategy promised."""
    job = replace(tiny_jobs.transformer, model=Wide)
    made = trainer(world, job, strategy)
    made.step(seeded_batch(job, 0))
    made.forward_backward(seeded_batch(job, 1))
    return dict(held_states(made).memory), promised_states(made.facts, made.strategy)


class Wide(nn.Module):
    """Large enough for Adam's step counters and the like not to matter; one embedding dominates."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(4096, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4))
        self.head = nn.Linear(64, tiny_jobs.VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.token(x)
        for block in self.blocks:
            y = y + block(y)
        return self.head(y)


def dropout_losses(world: World, strategy: str) -> list[float]:
    made = trainer(world, replace(tiny_jobs.transformer, schedule=None), strategy)
    return [made.step(seeded_batch(made.job, step)).loss for step in range(3)]


def evaluated(world: World, job: str, strategies: list[str]) -> list[float]:
    """The loss under each strategy after a step, without dropout in what is evaluated."""
    chosen = replace(getattr(tiny_jobs, job), optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    found = []
    for strategy in strategies:
        made = trainer(world, chosen, strategy)
        made.step(seeded_batch(chosen, 0))
        found.append(made.evaluate([seeded_batch(chosen, 0)]))
    return found


def sums_over_ranks(world: World, strategy: str) -> int:
    """How many sums over ranks one step takes: gradients, and the loss and the norm, which are one each.

    The loss is on its way until it is read: without reading it, a sum could begin after its step.
    """
    made = trainer(world, tiny_jobs.transformer, strategy)
    assert made.step(seeded_batch(made.job, 0)).loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert made.step(seeded_batch(made.job, 1)).loss
        # gloo's own threads end an event when they get round to it: at the latest when they have worked for this step.
        with torch.profiler.record_function(AFTER):
            made.step(seeded_batch(made.job, 2))
    events = profile.events()
    until = next(event.time_range.start for event in events if event.name == AFTER)
    return sum(_is_sum(event.name) and event.time_range.start < until for event in events)


def first_gradients(world: World, strategy: str) -> dict[str, torch.Tensor]:
    """The whole gradients of one step, on rank 0."""
    made = trainer(world, tiny_jobs.transformer, strategy)
    made.forward_backward(seeded_batch(made.job, 0))
    return whole_gradients(made)


def gathered_whole(world: World, limit: int) -> list[str]:
    """Gather tensors of many layouts in batches of a size; returns the names of those that came back changed."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = [(line, [Shard(0)]), (grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Replicate()])]
    layouts += [(grid, [Shard(0), Shard(0)]), (line, [Replicate()]), (line, [Shard(1)])]
    generator, given = torch.Generator().manual_seed(3), {}
    for shape, dtype in product([(31, 16), (3, 2), (1, 5), (8, 4, 4), (5, 0)], [torch.float64, torch.bfloat16]):
        for layout in [None, *layouts]:
            tensor = torch.randn(shape, generator=generator).to(dtype)
            sharded = tensor if layout is None else distribute_tensor(tensor, *layout)
            given[f"{dtype} {shape} as {layout}"] = tensor, sharded
    with patch.object(gather_whole, "BATCH", limit):
        found = list(gather_whole.gather_whole((name, sharded) for name, (_, sharded) in given.items()))
    assert [name for name, _ in found] == list(given)
    return [name for name, whole in found if whole.dtype != given[name][0].dtype or not whole.equal(given[name][0])]


AFTER = "the step after"


def _is_sum(name: str) -> bool:
    return name.startswith("gloo:") and "reduce" in name


def stops(world: World, strategy: str) -> list[bool]:
    """What three steps say of stopping, where only the last rank wishes to, and only at the second."""
    made = trainer(world, tiny_jobs.transformer, strategy)
    found = []
    for step in range(3):
        made.wish_to_stop = step == 1 and world.rank == world.ranks - 1
        found.append(made.step(seeded_batch(made.job, step)).stop)
    return found


def double_the_gradient(made: Trainer) -> None:
    made.engine.gradient_scale *= 2


PLANTS: dict[str, Any] = {"scale": double_the_gradient}


def any_batch_losses(world: World, strategies: list[str], steps: int) -> dict[tuple[str, str], list[float]]:
    """Losses on batches of the loader, for jobs with batches of every structure."""
    found = {}
    for name, job in any_batch_jobs.JOBS.items():
        for strategy in strategies:
            run = Run(trainer(world, job, strategy))
            found[name, strategy] = [run.step(batch).loss for batch in run.batches(steps=steps)]
    return found


def whole_batch_steps(world: World, jobs: list[str], strategies: list[str], steps: int) -> dict[Any, Any]:
    """Losses and parameters of jobs with a loss over the batch, on whole batches and on those of the loader."""
    found: dict[Any, Any] = {}
    for name in jobs:
        job = getattr(contrastive_jobs, name)
        for strategy in strategies:
            made = trainer(world, job, strategy)
            losses = [made.step(seeded_batch(job, step)).loss for step in range(steps)]
            found[name, strategy, "whole"] = losses, {key: value.clone() for key, value in made.engine.state()}
            if job.data is not None:
                run = Run(trainer(world, job, strategy))
                found[name, strategy, "loaded"] = [run.step(batch).loss for batch in run.batches(steps=steps)]
    return found


SMALL = Shape(layers=2, width=64, heads=4, kv_heads=4, feed_forward=96, vocabulary=64, length=16)
PARTS = decoder_job(SMALL, global_batch=4)


def float8_in_parts(world: World, strategy: str, programs: bool) -> tuple[list[float], list[int]]:
    """Losses of a small decoder, and how many products in float8 the program of each block has."""
    with patch.object(float8, "SMALLEST", 1):
        made = trainer(world, PARTS, strategy)
    recording(programs)
    try:
        losses = [made.step(seeded_batch(PARTS, step)).loss for step in range(3)]
    finally:
        recording(programs_wanted())
    states = [program_state(made.engine.model.get_submodule(name)) for name in facts_of(world, PARTS).blocks]
    bound = [state.programs[0].program.instructions if state.programs else () for state in states]
    return losses, [sum(one.function is float8_linear for one in instructions) for instructions in bound]
