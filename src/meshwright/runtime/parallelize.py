"""`parallelize`: a model, its optimizer and its scheduler under a strategy, for a training loop that the user writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from meshwright.assemble.apply import RankSetup, lay_on_devices, lay_out
from meshwright.assemble.axes import lay_axes
from meshwright.assemble.check import check, check_strategy
from meshwright.assemble.device_placement import devices_for
from meshwright.assemble.rank_engine import RankEngine
from meshwright.assemble.world import World
from meshwright.describe.blocks import find_blocks
from meshwright.describe.model import batch_norm_names, describe, parameter_facts
from meshwright.describe.structure import map_tensors, tensors_of
from meshwright.errors import JobError, Refused
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import Blueprint, adopt, record
from meshwright.runtime.loop_optimizer import MakeOptimizer, claim, disown, rebuilt, take_over
from meshwright.runtime.own_loop import OwnLoop
from meshwright.runtime.parallel_model import Parallel
from meshwright.runtime.place import place_of
from meshwright.runtime.run import enter_world
from meshwright.strategies import inner_axis
from meshwright.strategies.engine import Engine
from meshwright.strategies.model_axis import InnerAxis
from meshwright.strategies.pipeline.stages import cut_stages

Build = Callable[[], nn.Module]
MakeScheduler = Callable[[Optimizer], Any]
Loss = Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]]


@overload
def parallelize(model: Build | nn.Module, strategy: Strategy | str, **options: Any) -> Parallel: ...


@overload
def parallelize(
    model: Build | nn.Module, strategy: Strategy | str, *, optimizer: Optimizer | MakeOptimizer, **options: Any
) -> tuple[Parallel, Optimizer]: ...


@overload
def parallelize(
    model: Build | nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: Optimizer | MakeOptimizer,
    scheduler: Any,
    **options: Any,
) -> tuple[Parallel, Optimizer, Any]: ...


def parallelize(
    model: Build | nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: Optimizer | MakeOptimizer | None = None,
    scheduler: Any = None,
    sample: Any = None,
    inputs: Callable[[Any], Any] | None = None,
    loss: Loss | None = None,
    global_batch: int | None = None,
    seed: int = 0,
    device: str | None = None,
    blocks: Sequence[str] | None = None,
    tensor_plan: Mapping[str, str] | None = None,
    stages: Sequence[str] | None = None,
    world: World | None = None,
) -> Any:
    """Lay a model out over the launched ranks. Returns what was given: the model, its optimizer, its scheduler.

    A builder is better than a model: each rank then holds only its part, and weights depend only on the seed. Optimizer
    and scheduler are existing ones, or functions that make them from parameters and from the optimizer. `sample` is an
    example batch, or a function from a number of samples to one; strategies that divide the model need it. `inputs`
    turns a batch into the model's arguments; `loss` turns (output, batch) into (sum, weight) for `forward_backward`.
    """
    chosen = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
    asked = LoopRequest(
        model=model,
        strategy=chosen,
        optimizer=optimizer,
        sample=sample,
        inputs=inputs or _as_arguments,
        loss=loss,
        global_batch=global_batch,
        seed=seed,
        blocks=blocks,
        tensor_plan=tensor_plan,
        stages=stages,
    )
    asked.refuse_unsuited()
    world = world or enter_world(device)
    before = asked.parameters_before()
    loop = build_loop(asked, world)
    disown(before)
    claim(loop)
    found = Parallel(loop)
    if optimizer is None:
        if scheduler is not None:
            raise JobError("mw.parallelize got a scheduler without its optimizer; give optimizer=..., too.")
        return found
    made = take_over(optimizer, loop, before)
    if scheduler is None:
        return found, made
    loop.schedule = _scheduler_of(scheduler, optimizer, made)
    return found, made, loop.schedule


@dataclass(frozen=True, kw_only=True)
class LoopRequest:
    """What a user asked `parallelize` for."""

    model: Build | nn.Module
    strategy: Strategy
    optimizer: Optimizer | MakeOptimizer | None
    sample: Any
    inputs: Callable[[Any], Any]
    loss: Loss | None
    global_batch: int | None
    seed: int
    blocks: Sequence[str] | None
    tensor_plan: Mapping[str, str] | None
    stages: Sequence[str] | None

    def refuse_unsuited(self) -> None:
        """Refuse what a user's loop cannot run, before any rank is joined."""
        strategy = self.strategy
        if strategy.engine != "torch":
            raise Refused(
                f"{strategy}: engine={strategy.engine} runs the optimizer itself; use mw.setup(job, ...), or leave it out."
            )
        if strategy.micro_batch is not None:
            raise Refused(
                f"{strategy}: in your own loop you divide the batch yourself, so mb={strategy.micro_batch} has nothing to "
                "do; call backward for each part, all but the last under model.no_sync(), and leave mb out."
            )
        for term in strategy.inner_axes:
            if type(inner_axis(term)).finish is not InnerAxis.finish:
                raise Refused(f"{strategy}: {term.word} completes gradients once per step; use mw.setup(job, ...).")
        if strategy.axes and self.sample is None:
            raise JobError(
                f"{strategy} divides the model by what one call of it shows; give mw.parallelize an example of a batch: "
                "sample=..., and inputs=... if the model takes only a part of it."
            )

    def parameters_before(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Names and parameters of a model that exists already, by identity."""
        if not isinstance(self.model, nn.Module):
            return {}
        return {id(parameter): (name, parameter) for name, parameter in self.model.named_parameters()}

    def job(self, ranks: int) -> Job:
        """The loop as a job: enough to describe the model."""
        model, optimizer = self.model, self.optimizer
        if isinstance(optimizer, Optimizer):
            optimizer = rebuilt(optimizer, {key: name for key, (name, _) in self.parameters_before().items()})
        samples = _count(self.sample)
        return Job(
            model=(lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model,
            inputs=self.inputs,
            loss=self.loss or _sum_of_outputs,
            optimizer=optimizer or _plain_sgd,
            global_batch=self.global_batch or max(samples, ranks),
            loss_over="samples",
            sample=self.sample if callable(self.sample) else lambda number: _samples(self.sample, number),
            blocks=self.blocks,
            tensor_plan=self.tensor_plan,
            stages=self.stages,
        )


def build_loop(asked: LoopRequest, world: World) -> OwnLoop:
    """Lay the model out. All ranks must call it."""
    blueprint = None if isinstance(asked.model, nn.Module) else record(asked.model, asked.seed, values=world.has_weights)
    structure = blueprint.model if blueprint else asked.model
    assert isinstance(structure, nn.Module)
    place = place_of(world, asked.strategy)
    if asked.sample is None:
        facts = _facts_without_call(structure, asked)
        resolved = check_strategy(facts, asked.strategy, place)
    else:
        job = asked.job(world.ranks)
        facts = describe(job)
        resolved = check(job, facts, asked.strategy, place)
        # The loop's loss is unknown: it may use what no output shows.
        facts = replace(facts, parameters=tuple(replace(parameter, used=True) for parameter in facts.parameters))
    if resolved.traits.many_devices and world.ranks > 1:
        raise Refused(f"{resolved.data} runs in one process, but {world.ranks} were launched; use ddp, or launch one.")
    # Only after all checks: adopting a model takes its weights away until it is laid out.
    blueprint = blueprint or adopt(structure)
    setup = RankSetup(facts=facts, strategy=resolved, axes=lay_axes(resolved, world), world=world, own_loop=True)
    return OwnLoop(_engine(blueprint, setup, asked), facts, resolved, setup.axes, world, seed=asked.seed)


def _engine(blueprint: Blueprint, setup: RankSetup, asked: LoopRequest) -> Engine:
    strategy, axes, world = setup.strategy, setup.axes, setup.world
    if axes.stages is not None:
        raise Refused(f"{strategy}: pipelines need mw.setup(job, ...).")
    if strategy.stage_axis is not None:
        stages = cut_stages(setup.facts, strategy.stage_ranks, asked.stages)
        return lay_on_devices(blueprint, setup, stages=stages, devices=devices_for(strategy.stage_ranks, world.device))
    engine, cuts = lay_out(blueprint, setup)
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


def _scheduler_of(scheduler: Any, given: Any, optimizer: Optimizer) -> Any:
    if not hasattr(scheduler, "step"):
        return scheduler(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise JobError(
            "The scheduler given to mw.parallelize belongs to another optimizer than the one given; give a function, "
            "scheduler=lambda optimizer: ..., or build it on the optimizer that mw.parallelize returns."
        )
    return scheduler


def _as_arguments(batch: Any) -> Any:
    return batch if isinstance(batch, tuple | list | dict) else (batch,)


def _plain_sgd(parameters: NamedParameters) -> Optimizer:
    return SGD(parameters, lr=0.1)


def _sum_of_outputs(output: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """A loss that depends on every output, for describing a model whose loss is in the user's loop."""
    floating = [tensor.float().square().sum() for tensor in tensors_of(output) if tensor.requires_grad]
    if not floating:
        raise JobError("No output of the model depends on a trainable parameter.")
    return torch.stack(floating).sum(), 1.0


def _count(batch: Any) -> int:
    if batch is None or callable(batch):
        return 1
    return next((int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.dim()), 1)


def _samples(batch: Any, number: int) -> Any:
    """A batch of so many samples, which repeats those of an example."""
    length = _count(batch)

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        has_samples = tensor.dim() > 0 and tensor.shape[0] == length
        return tensor[torch.arange(number) % length] if has_samples else tensor

    return map_tensors(repeat, batch)
