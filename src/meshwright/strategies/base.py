"""The interface of a data strategy: what it is, what a rank holds under it, and how it is applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright.facts.data_axis import DataTraits
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.engine import ApplyContext, Engine


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
    """How each state is divided over ranks, and the bytes of one element."""

    parameters: int = 1
    """Ranks that share them; 1 if every rank has them whole. The same for gradients and optimizer."""
    gradients: int = 1
    optimizer: int = 1
    parameter_bytes: int | None = None
    """Per parameter element between steps; None: as in the built model."""
    update_bytes: int | None = None
    """Per gradient element, and per element of an optimizer slot; None: as in the built model."""
    masters: bool = False
    """Whether the optimizer keeps a copy of the parameters in the dtype of the built model."""


class DataStrategy(ABC):
    """An implementation of the data axis. Stateless: everything it needs is in its arguments."""

    summary: ClassVar[str]
    """One line for help texts."""
    traits: ClassVar[DataTraits]
    lowers: ClassVar[bool] = False
    """Whether it casts parameters to the compute dtype itself."""
    lowered_copy: ClassVar[bool] = False
    """Whether it keeps parameters in the compute dtype, and fp32 masters with the optimizer."""
    overlaps: ClassVar[bool] = True
    """Whether it communicates during backward, so that blocks must be compiled separately."""

    captures: ClassVar[bool] = False
    """Whether it communicates only after backward, so that forward and backward can be a CUDA graph."""

    sums_apart: ClassVar[bool] = False
    """Whether it can sum the gradients of some parameters over fewer ranks: `ApplyContext.apart`."""

    def compiles_blocks(self, strategy: Strategy) -> bool:
        """Whether blocks are compiled one by one, and not the model as a whole."""
        return self.overlaps or strategy.loss == "pieced"

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        """Why it cannot run, or None. Called before any process starts."""
        return None

    def axes(self, strategy: Strategy) -> dict[str, int]:
        """The mesh axes that it needs, by name and size; empty for one process."""
        return {"data": strategy.reduced_ranks}

    def kept_whole(self, facts: ModelFacts, apart: Mapping[str, DeviceMesh] | None = None) -> frozenset[str]:
        """Parameters that it does not shard although it shards the others; tied ones by each name.

        `apart` are those that an axis inside the data axis divides, with the ranks that share them.
        """
        return frozenset()

    def weights_on_host(self, strategy: Strategy) -> bool:
        """Whether `apply` takes initial weights from host memory."""
        return strategy.offload == "params"

    def layout(self, strategy: Strategy) -> StateLayout:
        """How states are divided under a resolved strategy."""
        low = strategy.number_format.bytes
        masters = self.lowered_copy and strategy.number_format.is_low and not strategy.pure and not strategy.autocast
        return StateLayout(
            **{state: strategy.state_shards for state in strategy.traits.shards},
            parameter_bytes=low if strategy.pure or masters else None,
            update_bytes=low if strategy.pure else None,
            masters=masters,
        )

    @abstractmethod
    def apply(self, model: nn.Module, context: ApplyContext) -> Engine:
        """Apply the strategy to a model, which is on the meta device until `context.fill()` is called."""
