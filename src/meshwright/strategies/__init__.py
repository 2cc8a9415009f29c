"""Every way to lay the data axis. Adding one is a file and a line here."""

from __future__ import annotations

from meshwright.facts.data_axis import DATA_AXES
from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout, Place
from meshwright.strategies.ddp import Ddp
from meshwright.strategies.dp import Dp
from meshwright.strategies.fsdp import Fsdp
from meshwright.strategies.hsdp import Hsdp
from meshwright.strategies.single import Single
from meshwright.strategies.zero1 import Zero1
from meshwright.strategies.zero2 import Zero2

DATA_STRATEGIES: dict[str, DataStrategy] = {}
"""By the word in the strategy's text."""
NONE = Single()
"""Where the model's axes took every rank there is no data axis to lay."""


def register(technique: DataStrategy) -> None:
    """Make a data strategy known to the grammar, the planner, the engines and every verb."""
    DATA_STRATEGIES[technique.traits.word] = technique
    DATA_AXES[technique.traits.word] = technique.traits


def unregister(word: str) -> None:
    del DATA_STRATEGIES[word], DATA_AXES[word]


def data_strategy(strategy: Strategy) -> DataStrategy:
    """What lays the data axis of a strategy."""
    if strategy.engine == "deepspeed":
        from meshwright.strategies.deepspeed.strategy import STAGES  # only where it is asked for: it imports torch

        return STAGES[strategy.traits.zero_stage or 0]
    return NONE if strategy.data is None else DATA_STRATEGIES[strategy.data]


# In the order in which errors, plans and comparisons list them.
register(Single())
register(Dp())
register(Ddp())
register(Zero1())
register(Zero2())
register(Fsdp())
register(Hsdp())

__all__ = ["DATA_STRATEGIES", "DataStrategy", "Layout", "Place", "data_strategy", "register", "unregister"]
