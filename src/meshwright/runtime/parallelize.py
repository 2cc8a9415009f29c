"""`parallelize`: a model, its optimizer and its scheduler under a strategy, for a loop that the user writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, overload

from torch import nn
from torch.optim import Optimizer

from meshwright.assemble.apply import RankSetup, lay_on_devices, lay_out
from meshwright.assemble.axes import lay_axes
from meshwright.assemble.check import check, check_strategy
from meshwright.assemble.device_placement import devices_for
from meshwright.assemble.rank_engine import RankEngine
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.blocks import find_blocks
from meshwright.describe.model import batch_norm_names, describe, parameter_facts
from meshwright.errors import JobError, Refused
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import Blueprint, adopt, record
from meshwright.runtime.loop_batches import PipelinedBatches, WholeModelBatches
from meshwright.runtime.loop_optimizer import MakeOptimizer, claim, disown, take_over
from meshwright.runtime.loop_request import Build, LoopRequest, Loss, as_arguments, plain_sgd
from meshwright.runtime.own_loop import OwnLoop
from meshwright.runtime.parallel_model import Parallel
from meshwright.runtime.pipeline_loop import PipelineLoop
from meshwright.runtime.place import place_of
from meshwright.runtime.run import enter_world
from meshwright.strategies.engine import Engine
from meshwright.strategies.pipeline.stages import cut_stages


class LoopOptions(TypedDict, total=False):
    """Further arguments of `parallelize`."""

    sample: Any
    """An example of a batch, or a function from a number of samples to one. What divides the model needs it."""
    inputs: Callable[[Any], Any] | None
    """From a batch to the model's arguments, as a tuple or a dict; None: the batch itself."""
    loss: Loss | None
    """From (output, batch) to (sum, weight), for `forward_backward` and `evaluate`. Pipelines need it."""
    global_batch: int | None
    """Samples of a batch over all ranks, for `forward_backward`; None: as in `sample`."""
    seed: int
    device: str | None
    blocks: Sequence[str] | None
    """Names of the repeated modules, if they cannot be found."""
    tensor_plan: Mapping[str, str] | None
    stages: Sequence[str] | None
    world: World | None


@overload
def parallelize(
    model: Build | nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: None = None,
    scheduler: None = None,
    **options: Unpack[LoopOptions],
) -> Parallel: ...


@overload
def parallelize(
    model: Build | nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: Optimizer | MakeOptimizer,
    scheduler: None = None,
    **options: Unpack[LoopOptions],
) -> tuple[Parallel, Optimizer]: ...


@overload
def parallelize(
    model: Build | nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: Optimizer | MakeOptimizer,
    scheduler: Any,
    **options: Unpack[LoopOptions],
) -> tuple[Parallel, Optimizer, Any]: ...


def parallelize(
    model: Build | nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: Optimizer | MakeOptimizer | None = None,
    scheduler: Any = None,
    **options: Unpack[LoopOptions],
) -> Any:
    """Lay a model out over the launched ranks. Returns what was given: the model, its optimizer, its scheduler.

    A builder is better than a model: each rank then holds only its part, and weights depend only on the seed. Optimizer
    and scheduler may exist already, or be functions that make them from parameters and from the optimizer. The other
    options are those of `LoopOptions`.
    """
    if unknown := sorted(set(options) - set(LoopOptions.__annotations__)):
        raise JobError(f"mw.parallelize has no option {unknown[0]}; it has {', '.join(LoopOptions.__annotations__)}.")
    if scheduler is not None and optimizer is None:
        raise JobError("mw.parallelize got a scheduler without its optimizer; give optimizer=..., too.")
    asked = LoopRequest(
        model=model,
        strategy=Strategy.parse(strategy) if isinstance(strategy, str) else strategy,
        optimizer=optimizer,
        sample=options.get("sample"),
        inputs=options.get("inputs") or as_arguments,
        loss=options.get("loss"),
        global_batch=options.get("global_batch"),
        seed=options.get("seed", 0),
        blocks=options.get("blocks"),
        tensor_plan=options.get("tensor_plan"),
        stages=options.get("stages"),
    )
    asked.refuse_unsuited()
    before = asked.parameters_before()
    found = lay_out_loop(asked, options.get("world") or enter_world(options.get("device")))
    disown(before, found.loop)
    claim(found.loop)
    if optimizer is None:
        return found
    made = take_over(optimizer, found.loop, before)
    if scheduler is None:
        return found, made
    found.loop.schedule = _scheduler_of(scheduler, made)
    return found, made, found.loop.schedule


def lay_out_loop(asked: LoopRequest, world: World) -> Parallel:
    """Lay the model out. All ranks must call it."""
    place = place_of(world, asked.strategy)
    if asked.strategy.graphs:
        raise Refused(f"{asked.strategy}: graphs replays a step, and here you write the loop; use mw.setup(job, ...).")
    given = asked.model
    blueprint = None if isinstance(given, nn.Module) else record(given, asked.seed, values=world.has_weights)
    structure = blueprint.model if blueprint else given
    assert isinstance(structure, nn.Module)
    job = None if asked.sample is None else asked.job(world.ranks)
    if job is None:
        facts = _facts_without_call(structure, asked)
        resolved = check_strategy(facts, asked.strategy, place)
    else:
        facts = describe(job)
        resolved = check(job, facts, asked.strategy, place)
        # The loop's loss is unknown: it may use what no output shows.
        facts = replace(facts, parameters=tuple(replace(parameter, used=True) for parameter in facts.parameters))
    if resolved.traits.many_devices and world.ranks > 1:
        raise Refused(f"{resolved.data} runs in one process, but {world.ranks} were launched; use ddp, or launch one.")
    axes = lay_axes(resolved, world)
    if resolved.loss != "whole" and axes.stages is None:
        raise Refused("loss=pieced computes the loss of a Job, but here the loop computes it; drop loss=pieced.")
    if axes.stages is not None:
        assert job is not None
        asked.refuse_unknown_loss()
        trainer = Trainer(replace(job, optimizer=plain_sgd), facts, resolved, world, seed=asked.seed)
        return Parallel(PipelineLoop(trainer), PipelinedBatches(trainer))
    # Only after all checks: adopting a model takes its weights away until it is laid out.
    blueprint = blueprint or adopt(structure)
    setup = RankSetup(facts=facts, strategy=resolved, axes=axes, world=world, own_loop=True)
    loop = OwnLoop(_engine(blueprint, setup, asked), facts, resolved, axes, world, seed=asked.seed)
    return Parallel(loop, WholeModelBatches(loop, job) if job is not None and asked.loss is not None else None)


def _engine(blueprint: Blueprint, setup: RankSetup, asked: LoopRequest) -> Engine:
    strategy, axes, world = setup.strategy, setup.axes, setup.world
    if strategy.stage_axis is not None:
        stages = cut_stages(setup.facts, strategy.stage_ranks, asked.stages)
        return lay_on_devices(blueprint, setup, stages=stages, devices=devices_for(strategy.stage_ranks, world.device))
    engine, cuts = lay_out(blueprint, setup)
    kind = type(engine)
    if kind.finish is not Engine.finish and kind.end_backward is Engine.end_backward:
        raise Refused(f"{strategy}: {kind.__name__} completes gradients once per step; use mw.setup(job, ...).")
    return RankEngine([engine], axes, cuts=cuts) if axes.inner else engine


def _facts_without_call(model: nn.Module, asked: LoopRequest) -> ModelFacts:
    """The facts of a model of which no call was seen: samples may decide which parameters a rank uses."""
    return ModelFacts(
        parameters=parameter_facts(model, None),
        blocks=find_blocks(model, hint=asked.blocks),
        batch_norms=batch_norm_names(model),
        by_value=True,
        unseen="no call of it was seen",
    )


def _scheduler_of(scheduler: Any, optimizer: Optimizer) -> Any:
    if not hasattr(scheduler, "step"):
        return scheduler(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise JobError(
            "The scheduler given to mw.parallelize belongs to another optimizer than the one given; give a function, "
            "scheduler=lambda optimizer: ..., or build it on the optimizer that mw.parallelize returns."
        )
    return scheduler
