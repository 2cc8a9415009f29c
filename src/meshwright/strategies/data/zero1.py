"""`zero1`: every rank has whole parameters and gradients, and runs its part of the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.facts.data_axis import DataTraits
from meshwright.strategies.base import DataStrategy

if TYPE_CHECKING:
    from torch import nn

    from meshwright.strategies.engine import ApplyContext, Engine


class Zero1(DataStrategy):
    summary = "ZeRO-1: the optimizer's state is divided over ranks"
    traits = DataTraits(word="zero1", shards=("optimizer",), zero_stage=1, foreign=True, complexity=2)
    lowers = lowered_copy = True

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        from meshwright.strategies.data.sharded_update import ShardedUpdateEngine  # lazily: it imports DTensor

        context.fill()
        return ShardedUpdateEngine(model, context, keep_whole="gradients" not in self.traits.shards)
