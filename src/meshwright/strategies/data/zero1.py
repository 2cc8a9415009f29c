"""`zero1`: parameters and gradients whole on every rank; each rank keeps and runs its part of the optimizer."""

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
        from meshwright.strategies.data.sharded_update import (
            ShardedUpdateEngine,  # only where it runs: it brings DTensor along
        )

        context.fill()
        return ShardedUpdateEngine(model, context, keep_whole=True)
