"""Every way to lay the data axis, by its word in the strategy's text. Adding one is a file and a line here."""

from __future__ import annotations

from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout, Place
from meshwright.strategies.ddp import Ddp
from meshwright.strategies.deepspeed.strategy import DEEPSPEED_STRATEGIES
from meshwright.strategies.dp import Dp
from meshwright.strategies.engine import Engine, Setting
from meshwright.strategies.fsdp import Fsdp
from meshwright.strategies.hsdp import Hsdp
from meshwright.strategies.single import Single
from meshwright.strategies.zero1 import Zero1
from meshwright.strategies.zero2 import Zero2

DATA_STRATEGIES: dict[str, DataStrategy] = {
    "single": Single(),
    "dp": Dp(),
    "ddp": Ddp(),
    "zero1": Zero1(),
    "zero2": Zero2(),
    "fsdp": Fsdp(),
    "hsdp": Hsdp(),
}


def data_strategy(strategy: Strategy) -> DataStrategy:
    """What lays the data axis; where the model's axes took every rank there is none to lay."""
    if strategy.engine == "deepspeed":
        return DEEPSPEED_STRATEGIES[strategy.data or "single"]
    return DATA_STRATEGIES[strategy.data or "single"]


__all__ = ["DATA_STRATEGIES", "DataStrategy", "Engine", "Layout", "Place", "Setting", "data_strategy"]
