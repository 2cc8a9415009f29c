"""Test on the ranks whether an optimizer that reads whole tensors gives the same update on shards.

It gets DTensors, whose norms and products are those of the whole tensor. Most optimizers work on them unchanged; some
mix in plain tensors, or sum only what one rank holds.
"""

from __future__ import annotations

import torch

from meshwright.describe.optimizer import OptimizerTrial, differ
from meshwright.errors import Refused, one_line
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.engine import whole


def refuse_coupled_shards(job: Job, facts: ModelFacts, own: NamedParameters, strategy: Strategy) -> None:
    """Raise if the job's optimizer updates shards and whole tensors differently. All ranks must call it."""
    if not facts.couplings or not any(is_dtensor(parameter) for parameter in own):
        return
    from torch.distributed.tensor import distribute_tensor

    layouts = {name: (p.device_mesh, p.placements) for name, p in own.named() if is_dtensor(p)}

    def shard(name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in layouts:
            return value
        mesh, placements = layouts[name]
        return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)

    trial = OptimizerTrial(job, [(name, tuple(parameter.shape)) for name, parameter in own.named()])
    try:
        in_shards = {name: whole(moved).cpu() for name, moved in trial.run(shard).items()}
        reason = "its update differs there" if differ(trial.run(), in_shards) else ""
    except Exception as error:
        reason = one_line(error).removesuffix(".")
    if reason:
        raise Refused(
            f"The optimizer's update depends on whole tensors, which fails on the shards of {strategy}: {reason}. "
            "Use ddp, or an optimizer that updates each element from its own gradient, AdamW for example."
        )
