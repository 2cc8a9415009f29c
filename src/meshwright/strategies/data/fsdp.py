"""`fsdp` (= `zero3`), `fsdp:grad-op` and `fsdp:no-shard`: PyTorch's FSDP2, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.facts.data_axis import DataTraits
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Place

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.engine import ApplyContext, Engine

FULL = DataTraits(
    word="fsdp",
    aliases=("zero3",),
    shards=("parameters", "gradients", "optimizer"),
    gathers=True,
    reshards=True,
    zero_stage=3,
    foreign=True,
    complexity=4,
)
GRAD_OP = replace(FULL, reshards=False, zero_stage=None)
NO_SHARD = replace(GRAD_OP, shards=(), planned=False)


class Fsdp(DataStrategy):
    summary = "FSDP2: parameters, gradients and optimizer divided over ranks, gathered block by block"
    traits = replace(FULL, variants={"grad-op": GRAD_OP, "no-shard": NO_SHARD})
    lowers = True
    sums_apart = True

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        if facts.by_value and (strategy.compile or strategy.stage_axis):
            return (
                "The model looks at values, so samples may decide which parameters a rank uses; ranks must agree on "
                f"that between forward and backward, which {strategy} does not allow. Use zero2, or drop pp, layers "
                "and compile."
            )
        return None

    def kept_whole(self, facts: ModelFacts, apart: Mapping[str, DeviceMesh] | None = None) -> frozenset[str]:
        """Parameters that FSDP2 cannot cut (scalar, empty or strided), and those read outside their block's forward.

        So do experts of which one rank has all that is not elsewhere, and experts that are modules: samples decide
        which of them run, and a rank cannot gather one that another rank does not call.
        """
        outside = frozenset(facts.read_outside)
        uncut = (p for p in facts.parameters if not p.shape or not p.count or not p.contiguous or p.name in outside)
        listed = {name for experts in facts.experts if not experts.stacked for name in experts.parameters}
        alone = {name for name, mesh in (apart or {}).items() if name in listed or mesh.size() == 1}
        return frozenset(name for parameter in uncut for name in parameter.names) | alone

    def axes(self, strategy: Strategy) -> dict[str, int]:
        if strategy.traits.shards:
            return {"data": strategy.reduced_ranks}
        return {"replicate": strategy.reduced_ranks, "shard": 1}

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        from meshwright.strategies.data.fully_shard import shard  # lazily, because FSDP2 takes a second to import

        whole = self.kept_whole(context.facts, context.apart)
        return shard(model, context, reshard=context.strategy.traits.reshards, whole=whole)
