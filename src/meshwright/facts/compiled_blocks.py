"""What compiling a model as a whole makes of its blocks, or of all of it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.facts.costs import Kernel, Size

FUSED = "fused"
"""Name of the kernels that a compiler fuses from many operators."""


@dataclass(frozen=True, kw_only=True)
class CompiledMoment:
    """The fullest state of a compiled step while a unit runs, or between units."""

    activations: Size
    """Bytes besides parameters, gradients, the optimizer's state and libraries' workspaces."""
    gradients: float
    """Share of all gradients that have been made."""


@dataclass(frozen=True, kw_only=True)
class CompiledModel:
    """A whole compiled step, of a model without repeated blocks."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    moments: tuple[CompiledMoment, ...]


@dataclass(frozen=True, kw_only=True)
class CompiledBlocks:
    """One block of a compiled model."""

    kept: float = 1.0
    """Share of what an eager block keeps for backward that remains, if the model is compiled as a whole."""
    kept_apart: float | None = None
    """The same if each block is compiled by itself; None if it was not measured."""
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    """Its kernels; none if the model's blocks differ, or could not be compiled."""
    model: CompiledModel | None = None
    """In place of blocks, if the model repeats none."""
    moments_apart: tuple[CompiledMoment, ...] = ()
    """The moments of a step whose blocks are compiled one by one, if the model repeats none."""
