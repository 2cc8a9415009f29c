"""`dp`: `nn.DataParallel`, one process that copies the model to its devices in every forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.facts.data_axis import DataTraits
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Place

if TYPE_CHECKING:
    from torch import nn

    from meshwright.strategies.engine import ApplyContext, Engine


class Dp(DataStrategy):
    summary = "nn.DataParallel: one process, several GPUs; kept for comparison, ddp is faster"
    traits = DataTraits(word="dp", one_process=True, foreign=True, planned=False, compared=False, complexity=6)
    overlaps = False

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        if place.device == "cpu":
            return (
                "dp (nn.DataParallel) splits a batch over the GPUs of one process, and does nothing on a CPU; use ddp, "
                "which runs one process per CPU rank."
            )
        if place.ranks > place.devices:
            return f"dp runs in one process, which has {place.devices} of the {place.ranks} devices; use ddp."
        if facts.batch_norms:
            return "dp cannot synchronise BatchNorm between the devices of one process; use ddp."
        if strategy.number_format.is_low and not strategy.pure and not strategy.autocast:
            return (
                f"dp copies the model in every forward pass, which leaves no place for {strategy.precision} "
                f"copies of fp32 masters; use ddp,{strategy.precision} or dp,{strategy.precision}:pure, or "
                f"dp,{strategy.precision}:autocast."
            )
        if strategy.compile:
            return "dp copies the model in every forward pass, which defeats compile; use ddp,compile."
        return None

    def axes(self, strategy: Strategy) -> dict[str, int]:
        return {}

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        from torch.nn import DataParallel

        from meshwright.strategies.engine import Engine

        context.fill()
        return Engine(model, DataParallel(model, device_ids=list(context.devices)))
