"""What a model computes and keeps, unit by unit: found on fake tensors, so it costs no memory.

A unit is one call of a block, or of a module with weights around the blocks, with the glue that follows it; the loss is
the last one. All sizes are affine in the samples of a micro-batch, so two traces give every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


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
    made: Size = Size()
    """Bytes of its results."""
    shape: tuple[Size, ...] = ()
    """Of a matmul: (batch, m, n, k). Of attention: (batch times heads, queries, keys, width of a head)."""


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
    units: tuple[UnitCosts, ...]
    recompute: str = "none"

    def flops(self, samples: float) -> float:
        """Of forward and backward for so many samples."""
        return sum(k.flops.at(samples) for unit in self.units for k in (*unit.forward, *unit.backward))

    def recomputed(self, kind: str) -> ModelCosts:
        """The same model where blocks recompute: all (`full`), or all but products and attention (`selective`)."""
        if kind == "none":
            return self
        made: dict[str, UnitCosts] = {}
        for unit in self.units:
            if unit.like not in made:
                made[unit.like] = _recomputed(unit, kind) if unit.is_block else unit
        units = tuple(replace(made[u.like], name=u.name, parameters=u.parameters) for u in self.units)
        return replace(self, units=units, recompute=kind)

    def to_json(self) -> dict[str, Any]:
        """Units that are like an earlier one by their names alone."""
        units = [_names(unit) if unit.like != unit.name else asdict(unit) for unit in self.units]
        return {"precision": self.precision, "recompute": self.recompute, "units": units}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelCosts:
        made: dict[str, UnitCosts] = {}
        units = []
        for values in document["units"]:
            own = {"name": values["name"], "parameters": tuple(values["parameters"])}
            if values["name"] == values["like"]:
                made[values["name"]] = _unit({**values, **own})
            units.append(replace(made[values["like"]], **own))
        return cls(precision=document["precision"], recompute=document["recompute"], units=tuple(units))


def _names(unit: UnitCosts) -> dict[str, Any]:
    return {"name": unit.name, "like": unit.like, "parameters": unit.parameters}


def _unit(values: Mapping[str, Any]) -> UnitCosts:
    passes = {key: tuple(map(_kernel, values[key])) for key in ("forward", "backward")}
    sizes = {key: Size(**values[key]) for key in ("kept", "output", "forward_peak", "backward_peak")}
    return UnitCosts(**{**values, **passes, **sizes})


def _kernel(values: Mapping[str, Any]) -> Kernel:
    sizes = {key: Size(**values[key]) for key in ("flops", "bytes", "made")}
    return Kernel(**{**values, **sizes, "shape": tuple(Size(**size) for size in values["shape"])})


def _recomputed(unit: UnitCosts, kind: str) -> UnitCosts:
    products = [place for place, kernel in enumerate(unit.forward) if kernel.kind != "other"]
    dear = [unit.forward[place] for place in products if kind == "selective"]
    # Recomputing ends when backward has all it needs, which is before the last product: nobody needs its result.
    needed = unit.forward[: products[-1]] if products else unit.forward
    again = tuple(kernel for kernel in needed if kernel not in dear)
    kept = unit.output
    for kernel in dear:
        kept = kept + kernel.made
    return replace(unit, backward=(*again, *unit.backward), kept=kept, backward_peak=unit.backward_peak + unit.output)
