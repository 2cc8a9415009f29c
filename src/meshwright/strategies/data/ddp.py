"""`ddp`: PyTorch's DistributedDataParallel; every rank has a whole copy, and gradients are averaged in buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.facts.data_axis import DataTraits
from meshwright.strategies.base import DataStrategy

if TYPE_CHECKING:
    from torch import nn

    from meshwright.strategies.engine import ApplyContext, Engine


class Ddp(DataStrategy):
    summary = "DistributedDataParallel: a whole copy on every rank, gradients averaged"
    traits = DataTraits(word="ddp", gradients_rest=True, zero_stage=0, foreign=True, complexity=1)
    captures = True
    sums_apart = True

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        from meshwright.strategies.data.ddp_engine import replicate

        return replicate(model, context)
