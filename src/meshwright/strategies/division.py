"""What one rank of an inner axis holds, computes and sends, for the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.facts.costs import Kernel, UnitCosts


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Collectives of one kind and size in one pass over a unit. Computation waits for them."""

    kind: str
    """"all_gather", "reduce_scatter", "all_reduce" or "all_to_all"."""
    bytes: float
    """Of the whole tensor."""
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class UnitShare:
    parts: int = 1
    """Ranks that its activations and kernels are divided over."""
    kernel_parts: Callable[[Kernel], int] | None = None
    """Ranks that a kernel is divided over, if that differs from `parts`."""
    regathered: float = 0.0
    """Bytes of inputs that are gathered and kept whole until backward."""
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    intercepted: bool = False
    """Whether a mode intercepts each operator call, which costs host time."""


class Division:
    """A model divided by an inner axis. This base class divides nothing."""

    boundary_parts: int = 1
    """Ranks that the tensors between stages are divided over."""

    def parts_of(self, names: tuple[str, ...]) -> int:
        """Ranks that a parameter is divided over, given all its names; 1 if each rank has it whole."""
        return 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        """A rank's share of a unit in one micro-batch. `stream` is the bytes of the activations between blocks."""
        return UnitShare()

    def without_sequence(self) -> Division:
        """The same for an engine that keeps activations between layers whole on every rank."""
        return self
