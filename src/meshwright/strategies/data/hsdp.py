"""`hsdp=RxS`: FSDP2 over S neighbouring ranks, replicated R times; all-gathers stay within the S ranks."""

from __future__ import annotations

from dataclasses import replace

from meshwright.facts.strategy import Strategy
from meshwright.strategies.data.fsdp import FULL, Fsdp


class Hsdp(Fsdp):
    summary = "hybrid FSDP2: sharded over S ranks, replicated over R"
    traits = replace(FULL, word="hsdp", aliases=(), hybrid=True, zero_stage=None, complexity=5)

    def axes(self, strategy: Strategy) -> dict[str, int]:
        return {"replicate": strategy.replicas, "shard": strategy.state_shards}
