"""Lay out a job's model under a strategy, and choose what runs its forward and backward passes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from meshwright.assemble.apply import RankSetup, lay_on_devices, lay_out, make_whole
from meshwright.assemble.autocast import autocast_region
from meshwright.assemble.batch import Share
from meshwright.assemble.deepspeed_pipeline import build_deepspeed_pipeline
from meshwright.assemble.device_placement import Devices, devices_for
from meshwright.assemble.gathering import Gathering
from meshwright.assemble.graphs import CudaRecorder, GraphedPasses
from meshwright.assemble.low_copies import LowCopies
from meshwright.assemble.operator_dtypes import recomputing
from meshwright.assemble.passes import Dropout, Losses, Passes, PlainPasses
from meshwright.assemble.precision import compiles_loss, loss_under
from meshwright.assemble.rank_engine import RankEngine
from meshwright.assemble.staging import build_pipeline
from meshwright.assemble.whole_batch import WholeBatchLoss, WholeBatchPasses
from meshwright.assemble.world import outside_of_modes
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.samples import Cutter
from meshwright.facts.job import Job
from meshwright.recording.blueprint import record
from meshwright.strategies.engine import Engine
from meshwright.strategies.pipeline.stages import cut_stages


def build_passes(
    job: Job, setup: RankSetup, share: Share, cutter: Cutter, *, seed: int, devices: Devices | None
) -> Passes:
    """The passes of this rank, which hold its engine. All ranks must call it together.

    `devices` are those of `layers=N` in one process; None takes the GPUs and then the CPU.
    """
    strategy, world, axes = setup.strategy, setup.world, setup.axes
    losses, dropout = _losses(job, setup), Dropout(run_seed=seed, device=world.device)
    if axes.stages is not None and strategy.engine == "deepspeed":
        return build_deepspeed_pipeline(setup, losses, dropout)
    if axes.stages is not None:
        return build_pipeline(setup, losses, dropout)
    with outside_of_modes():
        blueprint = record(job.model, seed, values=world.has_weights)
    if strategy.stage_axis is not None:
        stages = cut_stages(setup.facts, strategy.stage_ranks, job.stages)
        chosen = devices or devices_for(strategy.stage_ranks, world.device)
        engine = lay_on_devices(blueprint, setup, stages=stages, devices=chosen)
        return _passes_for_loss(engine, losses, dropout, setup, share, cutter, counts=True)
    engine, cuts = lay_out(blueprint, setup)
    if axes.inner:
        engine = RankEngine([engine], axes, cuts=cuts)
    return _passes_for_loss(engine, losses, dropout, setup, share, cutter, counts=axes.first_inside)


def _losses(job: Job, setup: RankSetup) -> Losses:
    strategy, world = setup.strategy, setup.world
    autocast = autocast_region(strategy, world.device.type, fake=world.fake)
    return Losses(
        job=job,
        loss=loss_under(strategy.precision, job, compiled=compiles_loss(strategy), autocast=autocast),
        weight_per_sample=setup.facts.weight_per_sample,
        plain=partial(make_whole, axes=setup.axes),
        # PyTorch's checkpointing restores autocast itself.
        recomputing=nullcontext() if strategy.autocast else recomputing(DTYPES[strategy.precision]),
    )


def _passes_for_loss(
    engine: Engine, losses: Losses, dropout: Dropout, setup: RankSetup, share: Share, cutter: Cutter, *, counts: bool
) -> Passes:
    """Gather outputs if the loss is over the whole batch and the batch is cut."""
    strategy, world = setup.strategy, setup.world
    if strategy.graphs and world.device.type == "cuda":  # else it is planned, on fake tensors
        copies = LowCopies(engine.model, DTYPES[strategy.precision])
        return GraphedPasses(engine, losses, dropout, copies, CudaRecorder(), counts=counts)
    if setup.facts.loss_over != "batch" or (share.ranks == 1 and share.micro_batch is None):
        return PlainPasses(engine, losses, dropout, counts=counts)
    gathering = Gathering(share, setup.axes.batch_group(world))
    whole = WholeBatchLoss(losses, gathering, cutter, world.device)
    return WholeBatchPasses(engine, losses, dropout, whole, counts=counts and share.rank == 0, measures=counts)
