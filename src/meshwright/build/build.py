"""From a job and a strategy to something that can take a step: one written order of application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from meshwright.build.autocast import autocast_region
from meshwright.build.axes import Axes
from meshwright.build.batchnorm import synchronise_batch_norms, take_over_synchronised
from meshwright.build.fill import fill
from meshwright.build.hollow import Hollow
from meshwright.build.operators import compile_outside
from meshwright.build.placement import Devices, Follow, compute_in_place, place_parameters
from meshwright.build.precision import apply_precision, follow_table
from meshwright.build.recompute import recompute_blocks
from meshwright.build.world import World
from meshwright.describe.blueprint import Blueprint
from meshwright.describe.calls import Flow
from meshwright.describe.dtypes import DTYPES
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import data_strategy
from meshwright.strategies.cuts import Cuts
from meshwright.strategies.engine import Engine, Setting
from meshwright.strategies.operator import OperatorPlan, plan_operators, split_operators
from meshwright.strategies.stages import Stages
from meshwright.strategies.tensor import split_tensors, tensor_region, to_plain


def lay_out(
    blueprint: Blueprint,
    facts: ModelFacts,
    strategy: Strategy,
    axes: Axes,
    world: World,
    *,
    hollow: Hollow | None = None,
    flow: Flow | None = None,
    operators: OperatorPlan | None = None,
    engine_config: Mapping[str, Any] | None = None,
) -> tuple[Engine, Cuts]:
    """Apply a resolved strategy to a model, or to a stage of one (which has given up what it does not hold).

    `operators` is the unsplit model's plan for an operator axis: a stage alone would be planned otherwise.

    Tensor or operator axis, BatchNorm and precision, recompute, compile, the stage's calls, data axis.
    """
    technique = data_strategy(strategy)
    model = blueprint.model
    cuts = _cut(model, facts, strategy, axes, operators)
    setting = Setting(
        strategy=strategy,
        facts=facts,
        device=world.device,
        mesh=axes.data,
        fill=lambda: fill(blueprint, world, strategy, cuts),
        fake=world.fake,
        pipelined=hollow is not None,
        devices=tuple(range(strategy.data_ranks)) if strategy.traits.many_devices else (),
        engine_config=engine_config,
    )
    take_over_synchronised(model)
    if facts.batch_norms and (group := axes.batch_group(world)) is not None:
        plain = world.device.type == "cpu" or world.fake
        synchronise_batch_norms(model, group, in_plain_operators=plain)
    blocks = setting.blocks(model)
    left = technique.kept_whole(facts) if technique.lowers else None
    autocast = autocast_region(strategy, world.device.type, fake=world.fake)
    apply_precision(model, blocks, setting.compute_dtype, pure=strategy.pure, left_to_cast=left, autocast=autocast)
    if strategy.recompute != "none":
        recompute_blocks(blocks or [model], strategy.recompute)
    if strategy.compile:
        if strategy.number_format.is_low and not strategy.autocast:
            follow_table(blocks or [model], setting.compute_dtype)  # around what is recomputed, inside of the graph
        for module in blocks if technique.overlaps and blocks else [model]:
            compile_outside(module)
    if hollow is not None and flow is not None:
        hollow.watch_calls(flow)
    return technique.apply(model, setting), cuts


def lay_on_devices(
    blueprint: Blueprint, facts: ModelFacts, strategy: Strategy, stages: Stages, devices: Devices
) -> Engine:
    """`layers=N` in one process: each stage's calls and parameters on a device of their own."""
    model = blueprint.model
    blocks = [model.get_submodule(name) for name in facts.blocks]
    places = place_parameters(model, facts, stages, devices)
    autocast = autocast_region(strategy, devices[0].type)
    apply_precision(model, blocks, DTYPES[strategy.precision], pure=strategy.pure, autocast=autocast)
    if strategy.recompute != "none":
        recompute_blocks(blocks or [model], strategy.recompute)
    compute_in_place(model, facts, stages, devices)
    blueprint.fill(places)
    return PlacedEngine(model, devices)


class PlacedEngine(Engine):
    """One process whose model lies on several devices."""

    def __init__(self, model: nn.Module, devices: Devices) -> None:
        super().__init__(model)
        self._devices = devices

    def region(self) -> AbstractContextManager[Any]:
        return Follow(self._devices)


def model_region(strategy: Strategy, axes: Axes) -> Callable[[], AbstractContextManager[Any]]:
    """What must be around forward, loss and backward under a strategy."""
    if strategy.tp == 1 or axes.tensor is None:
        return nullcontext
    return partial(tensor_region, axes.tensor)


def plainly(strategy: Strategy, axes: Axes) -> Callable[[Any], Any]:
    """What makes plain tensors of those that tensor parallelism divides."""
    if strategy.tp == 1 or axes.tensor is None:
        return lambda tree: tree
    return partial(to_plain, mesh=axes.tensor)


def _cut(model: nn.Module, facts: ModelFacts, strategy: Strategy, axes: Axes, operators: OperatorPlan | None) -> Cuts:
    if axes.tensor is None:
        return {}
    if strategy.op > 1:
        plan = operators or plan_operators(model, strategy.op, frozenset(facts.read_elsewhere))
        return split_operators(model, plan, axes.tensor)
    assert facts.tensor_plan is not None
    return split_tensors(model, facts.tensor_plan, axes.tensor, facts.blocks)
