"""What a model computes and keeps, unit by unit: found on fake tensors, so it costs no memory.

A unit is one call of a block, or of a module with weights around the blocks, with the glue that follows it; the loss is
the last one. All sizes are affine in the samples of a micro-batch, so two traces give every batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """`fixed + each * samples`."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.each * samples

    def __add__(self, other: Size) -> Size:
        return Size(self.fixed + other.fixed, self.each + other.each)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One operator that launches work on a device."""

    name: str
    kind: str
    """"matmul", "attention", "convolution" or "other": which ceiling its speed has."""
    dtype: str
    flops: Size
    bytes: Size
    """Read and written."""
    shape: tuple[Size, ...] = ()
    """Of a matmul: (batch, m, n, k)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """One unit under one precision and one way of recomputing."""

    name: str
    like: str
    """The first unit that is the same in everything; its own name where it is the first."""
    is_block: bool
    parameters: tuple[str, ...]
    """Those that it reads, by their first names."""
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    """Recomputing included."""
    kept: Size
    """Bytes that are still there when the next unit begins: what backward needs, and its output."""
    output: Size
    """Bytes of what it hands on, which is what crosses a cut of a pipeline."""
    forward_peak: Size
    """Bytes at the fullest moment of its forward pass, over those that were there when it began."""
    backward_peak: Size
    """Bytes at the fullest moment of its backward pass, over what all earlier units keep. Its own are in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """All units in the order of their calls, the loss last."""

    precision: str
    recompute: str
    units: tuple[UnitCosts, ...]
    update_launches: int = 1
    """Kernels of an optimizer step that do not grow with the parameters."""

    @property
    def loss(self) -> UnitCosts:
        return self.units[-1]

    def flops(self, samples: float) -> float:
        """Of forward and backward for so many samples."""
        return sum(k.flops.at(samples) for unit in self.units for k in (*unit.forward, *unit.backward))
