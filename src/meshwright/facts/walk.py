"""One rank's step as a walk: what it gathers, computes, sends and frees, module by module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.facts.trace import Message, Operation

LOSS, OPTIMIZER, PASSES = "(loss)", "(optimizer)", "(between passes)"
"""Names of places that are no modules."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What a rank does in one module during one pass, or between modules."""

    phase: str
    """"forward", "backward" (including recomputation) or "update"."""
    module: str
    """The module's name, LOSS, OPTIMIZER or PASSES; empty for the model's code between modules."""
    micro_batch: int = 0
    operations: tuple[Operation, ...] = ()
    """Kernels, equal ones counted."""
    messages: tuple[Message, ...] = ()
    """Collectives and sends in the order in which they are issued; equal neighbours are counted."""
    gathered: int = 0
    """Bytes allocated for gathered parameters."""
    freed: int = 0
    """Bytes of gathered parameters that are freed."""
    kept: int = 0
    """Bytes of activations that stay for backward, less those that are freed."""
    held: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Bytes by cause at the visit's peak."""

    @property
    def flops(self) -> float:
        return sum(operation.flops * operation.count for operation in self.operations)

    @property
    def peak(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One rank's step, visit by visit."""

    rank: int
    ranks: int
    visits: tuple[Visit, ...]
    stages: tuple[int, ...] = ()
    """The pipeline stages that the rank holds; empty without a pipeline."""

    @property
    def fullest(self) -> Visit:
        """The visit with the highest peak."""
        return max(self.visits, key=lambda visit: visit.peak)
