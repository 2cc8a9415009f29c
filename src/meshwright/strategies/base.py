"""The interface of a data strategy: what it is, what a rank holds under it, and how it is applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright.facts.data_axis import DataTraits
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn

    from meshwright.strategies.engine import ApplyContext, Engine

"""Bytes of one element in each precision."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a strategy is to run."""

    device: str
    """"cpu" or "cuda"."""
    devices: int
    """How many devices of that kind one node has; for a CPU, how many ranks it may hold."""
    ranks: int
    local_ranks: int
    """Ranks on this node."""


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """What a rank holds of each state: over how many ranks it is divided, and the bytes of one element."""

    parameters: int = 1
    """Ranks that share them; 1 means that every rank has them whole. Likewise the next two."""
    gradients: int = 1
    optimizer: int = 1
    parameter_bytes: int | None = None
    """Of a resting parameter's element; None: as the model was built."""
    update_bytes: int | None = None
    """Of an element of a gradient, and of one of the optimizer's slots; None: as the model was built."""
    masters: bool = False
    """Whether a copy of the parameters as the model was built is kept with the optimizer."""


class DataStrategy(ABC):
    """One way to lay the data axis. Stateless: everything it needs is in its arguments."""

    summary: ClassVar[str]
    """One line for help texts."""
    traits: ClassVar[DataTraits]
    """What it is, for everything that asks before it is applied."""
    lowers: ClassVar[bool] = False
    """Whether it casts parameters to the compute dtype itself."""
    lowered_copy: ClassVar[bool] = False
    """Whether parameters rest in the compute dtype, beside fp32 masters that are kept with the optimizer."""
    overlaps: ClassVar[bool] = True
    """Whether it communicates while backward runs, so that compiling must stop at the blocks' borders."""

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        """Why this cannot be, or None. Called before any process starts."""
        return None

    def axes(self, strategy: Strategy) -> dict[str, int]:
        """The mesh axes that it needs, by name and size; empty for one process."""
        return {"data": strategy.data_ranks}

    def kept_whole(self, facts: ModelFacts) -> frozenset[str]:
        """Parameters that it leaves whole on every rank though it shards the others; tied ones by each name."""
        return frozenset()

    def weights_on_host(self, strategy: Strategy) -> bool:
        """Whether initial weights are made in host memory, from where `apply` takes them."""
        return strategy.offload == "params"

    def layout(self, strategy: Strategy) -> StateLayout:
        """What each rank holds under a resolved strategy."""
        low = strategy.number_format.bytes
        masters = self.lowered_copy and strategy.number_format.is_low and not strategy.pure and not strategy.autocast
        return StateLayout(
            **{state: strategy.shards for state in strategy.traits.shards},
            parameter_bytes=low if strategy.pure or masters else None,
            update_bytes=low if strategy.pure else None,
            masters=masters,
        )

    @abstractmethod
    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        """Lay the model out. It is on the meta device until `context.fill()` is called."""
