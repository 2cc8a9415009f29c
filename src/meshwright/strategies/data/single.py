"""`single`: one process on one device, the reference for every other strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.facts.data_axis import DataTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy

if TYPE_CHECKING:
    from torch import nn

    from meshwright.strategies.engine import ApplyContext, Engine


class Single(DataStrategy):
    summary = "one process, one device"
    traits = DataTraits(
        word="single", sized=False, one_process=True, foreign=True, planned=False, compared=False, complexity=0
    )
    overlaps = False
    captures = True

    def axes(self, strategy: Strategy) -> dict[str, int]:
        return {}

    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        from meshwright.strategies.engine import Engine

        context.fill()
        return Engine(model)
