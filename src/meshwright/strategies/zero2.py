"""`zero2`: as `zero1`, and each rank keeps its part of the gradients only."""

from __future__ import annotations

from torch import nn

from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout
from meshwright.strategies.engine import Engine, Setting


class Zero2(DataStrategy):
    summary = "ZeRO-2: the optimizer's state and the gradients are divided over ranks"
    lowers = True

    def layout(self, strategy: Strategy) -> Layout:
        ranks = strategy.data_ranks
        return Layout(gradients=ranks, optimizer=ranks, lowered_copy=True)

    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        from meshwright.strategies.shards import ShardedUpdateEngine  # only where it runs: it brings DTensor along

        setting.fill()
        return ShardedUpdateEngine(model, setting, keep_whole=False)
