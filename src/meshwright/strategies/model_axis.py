"""The interface of a model axis: what it is, what it can divide, what a rank holds and sends, how it is applied.

There are two kinds. The ranks of an inner axis run the same layers together, each with a part of their work. The ranks
of a stage axis run different layers, one stage each, on the pipeline engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.named_parameters import NamedParameters
from meshwright.facts.strategy import Strategy
from meshwright.strategies.division import Division

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts


class ModelAxis(ABC):
    """One way to divide a model over ranks. Stateless: everything it needs is in its arguments."""

    summary: ClassVar[str]
    """One line for help texts."""
    traits: ClassVar[AxisTraits]
    """What it is, for everything that asks before it is applied."""

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        """Why it cannot divide this model, from its facts alone; None if it can."""
        return None

    def refuse_job(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
        """Why it cannot divide this job's model, where the builder has to be run to know."""
        return None

    def sizes(self, facts: ModelFacts, cluster: Cluster) -> Collection[int]:
        """The sizes that the planner's search considers; empty if it does so only when asked."""
        return ()

    def compared(self, ranks: int) -> Iterator[str]:
        """The strategies that `compare` runs with it unasked: by default it alone in every size."""
        yield from (f"{self.traits.word}={size}" for size in range(2, ranks + 1) if ranks % size == 0)

    def show(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> dict[str, Any]:
        """How it divides the model, as fields of `layout`'s document."""
        return {}


class InnerAxis(ModelAxis):
    """An axis whose ranks run the same layers together."""

    @abstractmethod
    def apply(self, model: nn.Module, facts: ModelFacts, mesh: DeviceMesh, plan: Any) -> Cuts:
        """Divide a model on the meta device; tells how each divided parameter is cut.

        The model may be a stage, which has given up what it does not hold; `plan` is what `plan` made of the whole.
        """

    def plan(self, model: nn.Module, facts: ModelFacts, ranks: int) -> Any:
        """What has to be known of the whole model before stages give up their parameters."""
        return None

    def region(self, mesh: DeviceMesh) -> AbstractContextManager[Any]:
        """What surrounds forward, loss and backward."""
        return nullcontext()

    def whole(self, tree: Any, mesh: DeviceMesh) -> Any:
        """A tree of outputs with divided tensors made whole, differentiably."""
        return tree

    def finish(self, parameters: NamedParameters, mesh: DeviceMesh) -> None:
        """After the last backward: complete the gradients of parameters that every rank has whole."""

    def division(self, facts: ModelFacts, ranks: int) -> Division:
        """What a rank holds, computes and sends, for the planner. The default divides nothing and sends nothing."""
        return Division()


class StageAxis(ModelAxis):
    """An axis that gives each rank consecutive layers. The pipeline engine runs its schedule."""

    def refuse(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, global_batch: int) -> str | None:
        from meshwright.strategies.pipeline.sizes import refuse_pipeline

        return refuse_pipeline(strategy, facts, global_batch)

    def refuse_job(self, term: AxisTerm, strategy: Strategy, facts: ModelFacts, job: Job) -> str | None:
        from meshwright.strategies.pipeline.sizes import refuse_stages

        return refuse_stages(strategy, facts, job)
