"""What one rank of an inner axis holds, computes and sends, as the planner counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.facts.costs import Kernel, UnitCosts


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Collectives of one kind and size in one pass over a unit, which computation waits for."""

    kind: str
    """"all_gather", "reduce_scatter", "all_reduce" or "all_to_all"."""
    bytes: float
    """Of the whole tensor."""
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class UnitShare:
    """A rank's share of one unit."""

    parts: int = 1
    """Ranks that its activations, and so its kernels, are divided over."""
    kernel_parts: Callable[[Kernel], int] | None = None
    """Ranks that one kernel is divided over, where that does not follow from the activations."""
    regathered: float = 0.0
    """Bytes of inputs that are gathered, and kept whole until backward."""
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    intercepted: bool = False
    """Whether the host looks into each operator as it is called, which takes it time."""


class Division:
    """One model divided by one inner axis. This one divides nothing: a base for others."""

    boundary_parts: int = 1
    """Ranks that what crosses a stage's border is divided over."""

    def parts_of(self, names: tuple[str, ...]) -> int:
        """Ranks that a parameter is divided over, given all its names; 1 if each rank has it whole."""
        return 1

    def share(self, unit: UnitCosts, samples: int, stream: float) -> UnitShare:
        """A rank's share of a unit in one micro-batch. `stream` is the bytes that flow from block to block."""
        return UnitShare()

    def without_sequence(self) -> Division:
        """The same in an engine that leaves activations between layers whole on every rank."""
        return self
