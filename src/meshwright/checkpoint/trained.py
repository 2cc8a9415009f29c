"""What a checkpoint holds the state of: the trainer of a job, or a model in a loop that the user writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from meshwright.assemble.ema import Ema
from meshwright.assemble.optimizer import HostCopies
from meshwright.assemble.precision import LossScale
from meshwright.assemble.world import World
from meshwright.facts.job import NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.engine import Engine, OptimizerState


class Trained(Protocol):
    """A model under a strategy with its optimizer, between two steps."""

    steps: int

    @property
    def world(self) -> World: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def seed(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def optimized(self) -> NamedParameters: ...

    @property
    def remembered(self) -> OptimizerState: ...

    @property
    def optimizer(self) -> Optimizer | None:
        """None if only weights are saved and loaded."""

    @property
    def schedule(self) -> Any: ...

    @property
    def loss_scale(self) -> LossScale | None: ...

    @property
    def ema(self) -> Ema | None:
        """The averaged weights; None if none are kept."""

    @property
    def base(self) -> Mapping[str, str] | None:
        """Fingerprints of the frozen parameters as they were built, which a checkpoint leaves out; None if it holds
        them."""

    @property
    def loop(self) -> dict[str, Any]:
        """What the training loop keeps: small values that are the same on all ranks."""

    @property
    def host(self) -> HostCopies | None: ...
