"""What every data strategy promises beside what it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar

from torch import nn

from meshwright.facts.forecast import Forecast
from meshwright.facts.model import ModelFacts, ParameterFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.engine import DTYPES, Engine, Setting


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
class Layout:
    """Over how many ranks each kind of state is divided; 1 means that every rank has it whole."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    lowered_copy: bool = False
    """Whether parameters rest in the compute dtype, beside fp32 masters that lie with the optimizer."""


class DataStrategy(ABC):
    """One way to lay the data axis. Stateless: everything it needs is in its arguments."""

    summary: ClassVar[str]
    """One line for help texts."""
    lowers: ClassVar[bool] = False
    """Whether it casts parameters to the compute dtype itself."""
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

    @abstractmethod
    def layout(self, strategy: Strategy) -> Layout:
        """What each rank holds."""

    @abstractmethod
    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        """Lay the model out. It is on the meta device until `setting.fill()` is called."""

    def account(self, facts: ModelFacts, strategy: Strategy) -> Forecast:
        """Bytes of states on the fullest rank at the end of a backward pass."""
        layout, low = self.layout(strategy), DTYPES[strategy.precision].itemsize
        master = low if strategy.pure else None
        whole = self.kept_whole(facts)
        lowered = strategy.precision != "fp32" and not strategy.pure and not strategy.autocast
        has_masters = layout.lowered_copy and lowered
        used = [p for p in facts.trainable if p.used]
        optimizer = shard_bytes(used, layout.optimizer, master, whole) * facts.optimizer_slots
        if has_masters:
            optimizer += shard_bytes(facts.parameters, layout.optimizer, None, whole)
        return Forecast(
            memory={
                "parameters": shard_bytes(facts.parameters, layout.parameters, low if has_masters else master, whole),
                "gradients": shard_bytes(used, layout.gradients, master, whole),
                "optimizer": round(optimizer),
            },
            time={},
        )


def shard_bytes(
    parameters: Iterable[ParameterFacts], ranks: int, itemsize: int | None, whole: frozenset[str] = frozenset()
) -> int:
    """Bytes on rank 0 when each parameter is cut along its first dim, as FSDP2 and our ZeRO do, but for the `whole`.

    `itemsize` is that of a dtype they are cast to; None keeps each in its own.
    """
    return sum(shard_elements(p.shape, 1 if p.name in whole else ranks) * (itemsize or p.itemsize) for p in parameters)


def shard_elements(shape: tuple[int, ...], ranks: int) -> int:
    return ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1
