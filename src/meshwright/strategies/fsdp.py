"""`fsdp` (= `zero3`), `fsdp:grad-op` and `fsdp:no-shard`: PyTorch's FSDP2, block by block."""

from __future__ import annotations

from torch import nn

from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout, Place
from meshwright.strategies.engine import Engine, Setting


class Fsdp(DataStrategy):
    summary = "FSDP2: parameters, gradients and optimizer divided over ranks, gathered block by block"
    lowers = True

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        if facts.by_value and (strategy.compile or strategy.pp > 1 or strategy.layers > 1):
            return (
                "The model looks at values, so samples may decide which parameters a rank uses; ranks agree on that "
                f"between forward and backward, which {strategy} leaves no room for. Use zero2, or drop pp, layers and "
                "compile."
            )
        return None

    def kept_whole(self, facts: ModelFacts) -> frozenset[str]:
        """Those that FSDP2 cannot cut (scalar, empty or strided), and those read where their block is not gathered."""
        outside = frozenset(facts.read_outside)
        uncut = (p for p in facts.parameters if not p.shape or not p.count or not p.contiguous or p.name in outside)
        return frozenset(name for parameter in uncut for name in parameter.names)

    def axes(self, strategy: Strategy) -> dict[str, int]:
        if strategy.variant == "no-shard":
            return {"replicate": strategy.data_ranks, "shard": 1}
        return {"data": strategy.data_ranks}

    def layout(self, strategy: Strategy) -> Layout:
        ranks = 1 if strategy.variant == "no-shard" else strategy.data_ranks
        return Layout(parameters=ranks, gradients=ranks, optimizer=ranks)

    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        from meshwright.strategies.fully_shard import shard  # only where it runs: FSDP2 takes a second to import

        return shard(model, setting, reshard=setting.strategy.variant == "", whole=self.kept_whole(setting.facts))
