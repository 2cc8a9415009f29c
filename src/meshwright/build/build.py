"""From a job and a strategy to something that can take a step: one written order of application."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.build.batchnorm import synchronise_batch_norms
from meshwright.build.precision import batch_norm_in_fp32, cast_borders, cast_parameters
from meshwright.build.recompute import recompute_blocks
from meshwright.build.world import World
from meshwright.describe.blueprint import Blueprint
from meshwright.errors import JobError
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies import DATA_STRATEGIES, Engine, Setting


def lay_out(blueprint: Blueprint, facts: ModelFacts, strategy: Strategy, world: World) -> Engine:
    """Apply a resolved strategy: BatchNorm and precision, recompute, compile, data axis."""
    technique = DATA_STRATEGIES[str(strategy.data)]
    setting = Setting(
        strategy=strategy,
        facts=facts,
        device=world.device,
        mesh=_mesh(technique.axes(strategy), world),
        fill=lambda: _fill(blueprint, world, strategy),
        fake=world.fake,
        devices=tuple(range(strategy.data_ranks)) if strategy.data == "dp" else (),
    )
    model = blueprint.model
    if facts.batch_norms and strategy.data_ranks > 1 and world.group is not None:
        plain = world.device.type == "cpu" or world.fake
        model = synchronise_batch_norms(model, world.group, in_plain_operators=plain)
    blocks = setting.blocks(model)
    apply_precision(model, blocks, setting.compute_dtype, pure=strategy.pure, casts_itself=technique.lowers)
    if strategy.recompute != "none":
        recompute_blocks(blocks or [model], strategy.recompute)
    if strategy.compile:
        for module in blocks if technique.overlaps and blocks else [model]:
            module.compile()
    return technique.apply(model, setting)


def apply_precision(
    model: nn.Module, blocks: list[nn.Module], dtype: torch.dtype, *, pure: bool, casts_itself: bool
) -> None:
    """Compute in `dtype`. Parameters are cast for good if `pure`, and left to the data axis if it `casts_itself`."""
    if dtype == torch.float32:
        return
    if pure:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    elif not casts_itself:
        cast_parameters(model, dtype)
    batch_norm_in_fp32(model, dtype)
    cast_borders(model, blocks, dtype)


def _mesh(axes: dict[str, int], world: World) -> DeviceMesh | None:
    if not axes:
        return None
    return init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _fill(blueprint: Blueprint, world: World, strategy: Strategy) -> None:
    """Initial weights, and proof that every rank has the same."""
    device = torch.device("cpu") if strategy.offload == "params" else world.device
    digest = blueprint.fill(device)
    if strategy.offload == "params":
        for buffer in blueprint.model.buffers():
            buffer.data = buffer.data.to(world.device)
    digests = world.gather(digest)
    if len(set(digests)) > 1:
        other = next(rank for rank, value in enumerate(digests) if value != digests[0])
        raise JobError(
            f"The model's builder gave other weights on rank {other} than on rank 0 from the same seed; "
            "it must draw random numbers from torch, numpy.random or random only."
        )
