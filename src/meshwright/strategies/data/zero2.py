"""`zero2`: as `zero1`, and each rank keeps its part of the gradients only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.facts.data_axis import DataTraits
from meshwright.strategies.base import DataStrategy

if TYPE_CHECKING:
    from torch import nn

    from meshwright.strategies.engine import ApplyContext, Engine


class Zero2(DataStrategy):
    summary = "ZeRO-2: the optimizer's state and the gradients are divided over ranks"
    traits = DataTraits(word="zero2", shards=("gradients", "optimizer"), zero_stage=2, foreign=True, complexity=3)
    lowers = lowered_copy = True

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        from meshwright.strategies.data.sharded_update import (
            ShardedUpdateEngine,  # only where it runs: it brings DTensor along
        )

        context.fill()
        return ShardedUpdateEngine(model, context, keep_whole=False)
