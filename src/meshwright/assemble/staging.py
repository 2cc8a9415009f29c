"""Cut a job's model into stages and build those of this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from meshwright import schedules
from meshwright.assemble.apply import RankSetup, lay_out, plan_inner_axes
from meshwright.assemble.autocast import autocast_region
from meshwright.assemble.float8 import layers_in_float8, multiply_in_float8
from meshwright.assemble.passes import Dropout, Losses
from meshwright.assemble.pipeline import OwnStage, PipelinePasses, shapes_of
from meshwright.assemble.precision import apply_precision, loss_under, separate_casts
from meshwright.assemble.rank_engine import Holders, RankEngine
from meshwright.assemble.stage_model import StageModel
from meshwright.assemble.world import outside_of_modes
from meshwright.describe.calls import Flow
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.flow import Watcher
from meshwright.describe.observe import make_batch, trace
from meshwright.describe.structure import map_tensors
from meshwright.errors import Refused
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.blueprint import Blueprint, record
from meshwright.strategies.cuts import Cuts
from meshwright.strategies.pipeline.sizes import count_micro_batches, count_stages
from meshwright.strategies.pipeline.stages import Stages, cut_stages, find_crossings, held_parameters
from meshwright.torch_private.fake_tensors import FakeTensor


def build_pipeline(setup: RankSetup, losses: Losses, dropout: Dropout) -> PipelinePasses:
    """Build this rank's stages under a resolved strategy, and the passes that run them."""
    facts, strategy, axes, world = setup.facts, setup.strategy, setup.axes, setup.world
    job, seed = losses.job, dropout.run_seed
    count = count_micro_batches(strategy, job.global_batch)
    stages = cut_stages(facts, count_stages(strategy), job.stages)
    device = "cuda" if world.fake else world.device.type
    pristine, follow = tracer(job, facts, strategy, seed, device=device)
    flow = follow(nominal_batch(job, strategy))
    held = held_parameters(pristine.model, flow, stages, find_crossings(flow, stages))
    refuse_moved_often(flow, facts, count)
    schedule = schedules.make(strategy.schedule, strategy.stage_ranks, count)
    holders = Holders(
        held=tuple(held),
        ranks=tuple(schedule.rank_of(stage) for stage in range(len(stages))),
        own=schedule.stages_of(axes.stage_rank),
        buffers={name: stages.stage_of(min(calls)) for name, calls in flow.moved.items()},
    )
    cuts: Cuts = {}
    own = []
    for index in holders.own:
        with outside_of_modes():
            blueprint = record(job.model, seed, values=world.has_weights)
        plans = plan_inner_axes(blueprint.model, facts, strategy)
        stage_model = StageModel(blueprint.model, stages, index, world.device)
        own_dtypes = strategy.autocast or not strategy.number_format.is_low
        stage_model.give_up(held[index], None if own_dtypes else DTYPES[strategy.precision])
        engine, cut = lay_out(blueprint, setup, stage_model=stage_model, flow=flow, plans=plans)
        cuts |= cut
        own.append(OwnStage(index, stage_model, engine))
    return PipelinePasses(
        RankEngine([stage.engine for stage in own], axes, cuts=cuts, pristine=pristine.model, holders=holders),
        own,
        stages,
        losses,
        dropout,
        schedule=strategy.schedule,
        trace=follow,
        counts=axes.first_inside,
        fake=world.fake,
        compiled=strategy.compile,
        steady=not strategy.inner_axes,
    )


def tracer(
    job: Job, facts: ModelFacts, strategy: Strategy, seed: int, *, device: str = "cuda"
) -> tuple[Blueprint, Callable[[Any], Flow]]:
    """The unsplit model without weights, and a function that traces a batch through it in the strategy's precision.

    `device` is the device type, on which autocast's dtypes depend.
    """
    with outside_of_modes():
        pristine = record(job.model, seed, values=False)
    blocks = [pristine.model.get_submodule(name) for name in facts.blocks]
    dtype = DTYPES[strategy.precision]
    autocast = autocast_region(strategy, device, fake=device == "cuda")
    multiply_in_float8(pristine.model, layers_in_float8(pristine.model, facts, strategy))
    apply_precision(pristine.model, blocks, dtype, pure=strategy.pure, autocast=autocast)
    traced = replace(job, loss=loss_under(strategy.precision, job, autocast=autocast))
    names = [call.name for call in facts.calls]
    flows: dict[tuple[Any, ...], Flow] = {}

    def follow(batch: Any) -> Flow:
        key = shapes_of(batch)
        if key in flows:
            return flows[key]
        with outside_of_modes(), separate_casts():
            flow, reason = trace(traced, pristine, Watcher(names), _without_values(batch))
        if flow is None:
            raise Refused(f"The model could not be traced on fake tensors, so it cannot be cut into stages: {reason}.")
        flows[key] = flow
        return flow

    return pristine, follow


def nominal_batch(job: Job, strategy: Strategy) -> Any:
    """A sample micro-batch of the usual size."""
    count = count_micro_batches(strategy, job.global_batch)
    with outside_of_modes(), torch.random.fork_rng(devices=[]):
        return make_batch(job, max(1, job.global_batch // strategy.data_ranks // count))


def _without_values(batch: Any) -> Any:
    """Replace fake tensors, which belong to a traced step, by real ones of the same shape without memory."""
    return map_tensors(
        lambda leaf: torch.zeros((), dtype=leaf.dtype).expand(leaf.shape) if isinstance(leaf, FakeTensor) else leaf,
        batch,
    )


def check_stages(job: Job, facts: ModelFacts, strategy: Strategy) -> Stages:
    """Refuse a model that cannot run as stages, before any process starts."""
    stages = cut_stages(facts, count_stages(strategy), job.stages)
    _, follow = tracer(job, facts, strategy, seed=0)
    flow = follow(nominal_batch(job, strategy))
    find_crossings(flow, stages)
    refuse_moved_often(flow, facts, count_micro_batches(strategy, job.global_batch))
    return stages


def refuse_moved_often(flow: Flow, facts: ModelFacts, micro_batches: int) -> None:
    """Refuse a buffer that every micro-batch would change, while one process changes it once per step."""
    moved = [name for name in flow.moved if name.rpartition(".")[0] not in facts.batch_norms]
    if moved and micro_batches > 1:
        raise Refused(
            f"The model changes {moved[0]} in every forward pass, and the pipeline cuts each batch into "
            f"{micro_batches} micro-batches, which changes the training; use layers=N, or tp, op or a data strategy "
            "without mb."
        )
