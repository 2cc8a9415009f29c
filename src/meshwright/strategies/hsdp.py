"""`hsdp=RxS`: FSDP2 over S neighbouring ranks, replicated R times; what is gathered stays within the S."""

from __future__ import annotations

from torch import nn

from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import Layout
from meshwright.strategies.engine import Engine, Setting
from meshwright.strategies.fsdp import Fsdp


class Hsdp(Fsdp):
    summary = "hybrid FSDP2: sharded over S ranks, replicated over R"

    def axes(self, strategy: Strategy) -> dict[str, int]:
        return {"replicate": strategy.replicas, "shard": strategy.shards}

    def layout(self, strategy: Strategy) -> Layout:
        return Layout(parameters=strategy.shards, gradients=strategy.shards, optimizer=strategy.shards)

    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        from meshwright.strategies.fully_shard import shard  # only where it runs: FSDP2 takes a second to import

        return shard(model, setting, reshard=True, whole=self.kept_whole(setting.facts))
