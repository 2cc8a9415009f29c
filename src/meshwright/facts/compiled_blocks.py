"""What compiling a model as a whole makes of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.facts.costs import Kernel

FUSED = "fused"
"""Name of the kernels that a compiler fuses from many operators."""


@dataclass(frozen=True, kw_only=True)
class CompiledBlocks:
    """One block of a model that is compiled as a whole."""

    kept: float = 1.0
    """Share of what an eager block keeps for backward that remains."""
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    """Its kernels; none if the model's blocks differ, or could not be compiled."""
