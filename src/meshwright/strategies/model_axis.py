"""The interface of a model axis: what it can divide, what a rank holds and sends, and how it is applied.

There are two kinds. The ranks of an inner axis run the same layers together, each with a part of the work. The ranks
of a stage axis run different layers, one stage each, on the pipeline engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy
from meshwright.strategies.division import Division

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts


class ModelAxis(ABC):
    """A way to divide a model over ranks. Stateless: everything it needs is in its arguments."""

    summary: ClassVar[str]
    """One line for help texts."""
    traits: ClassVar[AxisTraits]

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        """Why it cannot divide this model, by its facts alone; None if it can."""
        return None

    def refuse_job(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
        """Why it cannot divide this job's model, if only running the builder can tell."""
        return None

    def sizes(self, facts: ModelFacts, cluster: Cluster) -> Collection[int]:
        """The sizes that the planner considers without being asked."""
        return ()

    def compared(self, ranks: int) -> Iterator[str]:
        """The strategies with this axis that `compare` runs by default: the axis alone in every size."""
        yield from (f"{self.traits.word}={size}" for size in range(2, ranks + 1) if ranks % size == 0)

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        """How it divides the model, as fields of `layout`'s JSON."""
        return {}


class InnerAxis(ModelAxis):
    """An axis whose ranks run the same layers together."""

    @abstractmethod
    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        """Divide a model on the meta device, and return the cuts of its divided parameters.

        The model may be a stage that has dropped parameters; `plan` is the plan of the whole model.
        """

    def plan(self, model: nn.Module, facts: ModelFacts, ranks: int) -> Any:
        """What `apply` needs to know of the whole model, computed before stages drop their parameters."""
        return None

    def region(self, mesh: DeviceMesh) -> AbstractContextManager[Any]:
        """Context for forward, loss and backward."""
        return nullcontext()

    def whole(self, tree: Any, mesh: DeviceMesh) -> Any:
        """Gather the divided tensors of an output tree, differentiably."""
        return tree

    def finish(self, parameters: NamedParameters, mesh: DeviceMesh) -> None:
        """Complete the gradients of whole parameters after the last backward."""

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        """What a rank holds, computes and sends, for the planner. By default it divides and sends nothing."""
        return Division()


class StageAxis(ModelAxis):
    """An axis that gives each rank consecutive layers; the pipeline engine runs its schedule."""

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        from meshwright.strategies.pipeline.sizes import refuse_pipeline

        return refuse_pipeline(strategy, facts, global_batch)

    def refuse_job(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
        from meshwright.strategies.pipeline.sizes import refuse_stages

        return refuse_stages(strategy, facts, job)
