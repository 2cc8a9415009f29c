"""`single`: one process, one device; what every other strategy must equal."""

from __future__ import annotations

from torch import nn

from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout
from meshwright.strategies.engine import Engine, Setting


class Single(DataStrategy):
    summary = "one process, one device"
    overlaps = False

    def axes(self, strategy: Strategy) -> dict[str, int]:
        return {}

    def layout(self, strategy: Strategy) -> Layout:
        return Layout()

    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        setting.fill()
        return Engine(model)
