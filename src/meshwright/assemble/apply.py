"""Apply a strategy to a model.

`apply_in_order` fixes the order once, for a plain rank, for a pipeline stage (ours or DeepSpeed's) and for layers
spread over the devices of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from meshwright.assemble.autocast import autocast_region
from meshwright.assemble.axes import Axes
from meshwright.assemble.batchnorm import (
    Normalise,
    normalise_alone,
    normalise_on_cuda,
    normalise_plainly,
    synchronise_batch_norms,
    take_over_synchronised,
)
from meshwright.assemble.device_placement import Devices, FollowDevices, compute_in_place, place_parameters
from meshwright.assemble.fill import fill
from meshwright.assemble.float8 import layers_in_float8, multiply_in_float8
from meshwright.assemble.operator_dtypes import compile_outside
from meshwright.assemble.pieced_head import piece_head
from meshwright.assemble.precision import apply_precision, follow_table
from meshwright.assemble.recompute import recompute_blocks
from meshwright.assemble.stage_model import StageModel
from meshwright.assemble.world import World
from meshwright.describe.as_on_cuda import stands_in
from meshwright.describe.calls import Flow
from meshwright.describe.dtypes import DTYPES
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import Blueprint
from meshwright.strategies import data_strategy, inner_axis
from meshwright.strategies.cuts import Cuts
from meshwright.strategies.engine import ApplyContext, Engine
from meshwright.strategies.pipeline.stages import Stages

AxisPlans = Mapping[str, Any]
"""What each inner axis planned for the whole model, by the axis's word."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank builds: a model under a resolved strategy, and the rank's place among the others."""

    facts: ModelFacts
    strategy: Strategy
    axes: Axes
    world: World
    engine_config: Mapping[str, Any] | None = None
    """The user's DeepSpeed configuration."""
    own_loop: bool = False
    """Whether the user writes the loop."""

    def context(self, blueprint: Blueprint, cuts: Cuts, *, pipelined: bool) -> ApplyContext:
        """What the data strategy gets; `cuts` may be filled in until it makes the initial weights."""
        strategy, world = self.strategy, self.world
        return ApplyContext(
            strategy=strategy,
            facts=self.facts,
            device=world.device,
            mesh=self.axes.data,
            fill=lambda: fill(blueprint, world, strategy, cuts),
            fake=world.fake,
            pipelined=pipelined,
            own_loop=self.own_loop,
            devices=tuple(range(strategy.data_ranks)) if strategy.traits.many_devices else (),
            engine_config=self.engine_config,
        )


def plan_inner_axes(model: nn.Module, facts: ModelFacts, strategy: Strategy) -> AxisPlans:
    return {term.word: inner_axis(term).plan(model, facts, term.size) for term in strategy.inner_axes}


def apply_in_order(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    setup: RankSetup,
    *,
    plans: AxisPlans | None = None,
    called: Sequence[nn.Module] = (),
    route_calls: Callable[[], None] = lambda: None,
) -> Cuts:
    """Apply float8, inner axes, BatchNorm, precision, recompute, compile and call routing; the data axis comes after.

    `called` are the modules that the engine calls directly, if it never calls the model itself.
    """
    facts, strategy, axes, world = setup.facts, setup.strategy, setup.axes, setup.world
    technique, dtype = data_strategy(strategy), DTYPES[strategy.precision]
    plans = plan_inner_axes(model, facts, strategy) if plans is None else plans
    cuts: Cuts = {}
    if float8 := layers_in_float8(model, facts, strategy):
        multiply_in_float8(model, float8, *(inner_axis(term).float8_linear(mesh) for term, mesh in axes.inner))
    for term, mesh in axes.inner:
        cuts |= inner_axis(term).apply(model, facts, mesh, plans[term.word])
    take_over_synchronised(model)
    if facts.batch_norms and (group := axes.batch_group(world)) is not None:
        synchronise_batch_norms(model, group, _normalise_in(world))
    uncast = technique.kept_whole(facts, axes.apart(cuts)) if technique.lowers and not called else None
    autocast = autocast_region(strategy, world.device.type, fake=world.fake)
    apply_precision(
        model,
        list(blocks),
        dtype,
        pure=strategy.pure,
        left_to_cast=uncast,
        autocast=autocast,
    )
    if called:
        follow_table(called, dtype)
    if strategy.loss == "pieced" and facts.head is not None:
        piece_head(model, facts.head, dtype, compiled=strategy.compile)
    whole = list(called) or [model]
    if strategy.recompute != "none":
        by_operator = (strategy.compile and not strategy.inner_axes) or strategy.autocast
        recompute_blocks(list(blocks) or whole, strategy.recompute, by_operator=by_operator)
    for term in strategy.inner_axes if strategy.compile else ():
        inner_axis(term).compile_blocks(blocks)
    if strategy.compile and not strategy.inner_axes:
        if strategy.number_format.is_low and not strategy.autocast:
            follow_table(blocks or [model], dtype)  # outside the recomputed region, inside the compiled graph
        for module in _compiled_units(model, blocks, setup) or whole:
            compile_outside(module)
    route_calls()
    return cuts


def _compiled_units(model: nn.Module, blocks: Sequence[nn.Module], setup: RankSetup) -> Sequence[nn.Module]:
    """The modules that are compiled separately; none if the model is compiled as one."""
    if not setup.strategy.stage_axis:
        return blocks if data_strategy(setup.strategy).compiles_blocks(setup.strategy) else ()
    units = dict.fromkeys(call.name for call in setup.facts.calls)  # a stage runs some of them, and skips the others
    return blocks or [model.get_submodule(name) for name in units]


def lay_out(
    blueprint: Blueprint,
    setup: RankSetup,
    *,
    stage_model: StageModel | None = None,
    flow: Flow | None = None,
    plans: AxisPlans | None = None,
) -> tuple[Engine, Cuts]:
    """Apply a resolved strategy to a model, or to a stage that has dropped the parameters it does not hold.

    A stage passes the `plans` of the unsplit model, because planning the stage alone would give other results.
    """
    model = blueprint.model
    cuts: Cuts = {}
    context = setup.context(blueprint, cuts, pipelined=stage_model is not None)

    def route_calls() -> None:
        if stage_model is not None and flow is not None:
            stage_model.watch_calls(flow)

    cuts |= apply_in_order(model, context.blocks(model), setup, plans=plans, route_calls=route_calls)
    context = replace(context, apart=setup.axes.apart(cuts))
    return data_strategy(setup.strategy).apply(model, context), cuts


def lay_on_devices(blueprint: Blueprint, setup: RankSetup, *, stages: Stages, devices: Devices) -> Engine:
    """Apply a stage axis in one process: each stage computes and keeps its parameters on a separate device."""
    model, facts = blueprint.model, setup.facts
    blocks = [model.get_submodule(name) for name in facts.blocks]
    places = place_parameters(model, facts, stages, devices)
    apply_in_order(model, blocks, setup, route_calls=lambda: compute_in_place(model, facts, stages, devices))
    blueprint.fill(places)
    return PlacedEngine(model, devices)


class PlacedEngine(Engine):
    """Engine of one process whose model spans several devices."""

    def __init__(self, model: nn.Module, devices: Devices) -> None:
        super().__init__(model)
        self._devices = devices

    def region(self) -> AbstractContextManager[Any]:
        return FollowDevices(self._devices)


@contextmanager
def model_region(axes: Axes) -> Iterator[None]:
    """Enter the regions that the inner axes need around forward, loss and backward.

    The outermost axis sees functions first: its parts may be divided again by the axes inside.
    """
    with ExitStack() as stack:
        for term, mesh in reversed(axes.inner):
            stack.enter_context(inner_axis(term).region(mesh))
        yield


def make_whole(tree: Any, axes: Axes) -> Any:
    """Gather the tensors of an output tree that inner axes divide."""
    for term, mesh in axes.inner:
        tree = inner_axis(term).whole(tree, mesh)
    return tree


def _normalise_in(world: World) -> Normalise:
    """How BatchNorms normalise over ranks: a fake world holds and sends what the device that it stands for does."""
    if world.device.type == "cpu" and not stands_in():
        return normalise_plainly
    return normalise_alone if world.fake else normalise_on_cuda
