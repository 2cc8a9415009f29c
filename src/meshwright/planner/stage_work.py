"""What one rank computes, keeps and sends in a stage, at one micro-batch size."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshwright.planner.measured_kernels import NOTHING, KernelSeconds
from meshwright.strategies.model_axis import Sent


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """One unit at one micro-batch size, on one rank of the inner axes."""

    name: str
    is_block: bool
    forward: float
    """Seconds on the device."""
    backward: float
    forward_launches: int
    backward_launches: int
    kept: float
    """Bytes; the next three likewise."""
    output: float
    forward_peak: float
    backward_peak: float
    elements: int
    """Elements of the parameters that the unit reads, on this rank."""
    gathered_with: int
    """Elements that FSDP gathers for it: those of the largest shard unit that it runs."""
    in_units: int
    """How many of its own elements are in shard units; the others are gathered for the whole step."""
    trainable: int
    inside: int
    """How many of its elements are divided by an axis inside the data axis."""
    tensors: int
    """Number of parameters that the unit reads."""
    intercepted: bool
    """Whether an inner axis intercepts each of its operators on the host, where no recorded program runs."""
    sent: tuple[tuple[tuple[Sent, ...], tuple[Sent, ...]], ...] = field(hash=False)
    """For each inner axis: its messages in forward, and in backward."""
    host: tuple[float, float] | None = None
    """Host seconds of its own pass in forward and in backward, besides launches; None if they were not timed."""
    launching: tuple[float, float] = (0.0, 0.0)
    """What the launches in forward and in backward take of a timed host, in launches of a sum of small tensors."""
    kernels: KernelSeconds = NOTHING
    """Seconds of forward and backward by where they come from."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Consecutive units on one stage."""

    units: tuple[UnitWork, ...]
    elements: int
    """Elements of all parameters that the stage holds, each counted once."""
    trainable: int
    inside: int
    """How many of the elements are divided by an axis inside the data axis."""
    output: float
    """Bytes that one rank sends to the next stage."""
    idle: int = 0
    """Elements of parameters that could be trained, and that the model does not use."""

    @cached_property
    def counted(self) -> tuple[tuple[UnitWork, int], ...]:
        """Each distinct unit, with its number of occurrences."""
        counts: dict[int, list[Any]] = {}
        for unit in self.units:
            counts.setdefault(id(unit), [unit, 0])[1] += 1
        return tuple((unit, times) for unit, times in counts.values())

    @cached_property
    def tensors(self) -> int:
        """Parameters that the units read."""
        return sum(times * unit.tensors for unit, times in self.counted)

    @cached_property
    def around(self) -> int:
        """Elements that are in no shard unit: FSDP gathers them together, before everything else."""
        return max(0, self.elements - sum(unit.in_units for unit in self.units))

    @cached_property
    def is_one_unit(self) -> bool:
        """Whether no part of it is in a shard unit, so that FSDP gathers and reduces all of it at once."""
        return not any(unit.in_units for unit in self.units)

    @cached_property
    def kept(self) -> float:
        return sum(unit.kept for unit in self.units)

    @cached_property
    def climb(self) -> float:
        """Peak bytes of one micro-batch's forward and backward, on top of what the other micro-batches keep."""
        before, peak = 0.0, 0.0
        for unit in self.units:
            peak = max(peak, before + unit.forward_peak, before + unit.backward_peak)
            before += unit.kept
        return max(peak, before)

    @cached_property
    def logits(self) -> float:
        """The part of `climb` that belongs to the loss, on the last stage."""
        last = self.units[-1] if self.units else None
        return max(last.forward_peak, last.backward_peak) if last is not None and not last.elements else 0.0
