"""`zero1`: parameters and gradients whole on every rank; each rank keeps and runs its part of the optimizer."""

from __future__ import annotations

from torch import nn

from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout
from meshwright.strategies.engine import Engine, Setting


class Zero1(DataStrategy):
    summary = "ZeRO-1: the optimizer's state is divided over ranks"
    lowers = True

    def layout(self, strategy: Strategy) -> Layout:
        return Layout(optimizer=strategy.data_ranks, lowered_copy=True)

    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        from meshwright.strategies.shards import ShardedUpdateEngine  # only where it runs: it brings DTensor along

        setting.fill()
        return ShardedUpdateEngine(model, setting, keep_whole=True)
