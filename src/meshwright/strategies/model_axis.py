"""The interface of a model axis: what it can divide, what a rank holds and sends, and how it is applied.

There are two kinds. The ranks of an inner axis run the same layers together, each with a part of the work. The ranks
of a stage axis run different layers, one stage each, on the pipeline engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import Kernel, UnitCosts
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.model import ModelFacts
from meshwright.facts.model_axis import AxisTerm, AxisTraits
from meshwright.facts.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.strategies.cuts import Cuts


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Collectives of one kind and size in one pass over a unit. Computation waits for them."""

    kind: str
    """"all_gather", "reduce_scatter", "all_reduce" or "all_to_all"."""
    bytes: float
    """Of the whole tensor."""
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Surplus:
    """What the busiest rank computes and keeps beyond an even share, if samples decide how work is divided."""

    product: Kernel
    """In forward; backward computes two of this size."""
    kept: float
    """Bytes of activations that backward needs."""


@dataclass(frozen=True, kw_only=True)
class UnitShare:
    parts: int = 1
    """Ranks that its activations and kernels are divided over."""
    kernel_parts: Callable[[Kernel], int] | None = None
    """Ranks that a kernel is divided over, if that differs from `parts`."""
    regathered: float = 0.0
    """Bytes of inputs that are gathered and kept whole until backward."""
    passing: float = 0.0
    """Bytes that are gathered for a pass and freed again, where inputs are recomputed; backward makes gradients of the
    same size."""
    beside: float = 0.0
    """Bytes that a rank keeps until backward beside its share of what the undivided unit keeps."""
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    surplus: Surplus | None = None
    """None if the rank has an even share, or if shares do not depend on samples."""
    intercepted: bool = False
    """Whether a mode intercepts each operator call, which costs host time. Blocks run recorded programs instead."""


class Division:
    """What one rank of an inner axis holds, computes and sends, for the planner. This base class divides nothing."""

    boundary_parts: int = 1
    """Ranks that the tensors between stages are divided over."""

    def parts_of(self, names: tuple[str, ...]) -> int:
        """Ranks that a parameter is divided over, given all its names; 1 if each rank has it whole."""
        return 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        """A rank's share of a unit in one micro-batch. `stream` is the bytes of the activations between blocks."""
        return UnitShare()

    def at_worst(self) -> Division:
        """The same for the busiest rank, if samples divide the work as unevenly as they can."""
        return self

    def without_sequence(self) -> Division:
        """The same for an engine that keeps activations between layers whole on every rank."""
        return self


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

    def undivided(self, facts: ModelFacts, ranks: int) -> Mapping[str, str]:
        """Modules that the axis divides, but not over this many ranks, each with the reason."""
        return {}

    def plan(self, model: nn.Module, facts: ModelFacts, ranks: int) -> Any:
        """What `apply` needs to know of the whole model, computed before stages drop their parameters."""
        return None

    def region(self, mesh: DeviceMesh) -> AbstractContextManager[Any]:
        """Context for forward, loss and backward."""
        return nullcontext()

    def whole(self, tree: Any, mesh: DeviceMesh) -> Any:
        """Gather the divided tensors of an output tree, differentiably."""
        return tree

    def float8_linear(self, mesh: DeviceMesh) -> Callable[..., Any]:
        """`(x, weight, bias)` -> a linear layer's output, multiplied in float8. Called if `traits.float8`."""
        raise NotImplementedError

    def compile_blocks(self, blocks: Sequence[nn.Module]) -> None:
        """Compile what a rank computes of these blocks, in its own way. Called if `traits.compiles`."""

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
