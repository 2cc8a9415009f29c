"""What a model computes and keeps, unit by unit, measured on fake tensors.

A unit is one call of a block, or of a module with weights outside of blocks, with the operators that follow it; the
loss is the last one. The affine cost model: every size is `fixed + each * samples` in the samples of a micro-batch, so
two traces determine it for every batch size. Only peaks may need more, because another moment may be the fullest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """An amount that is affine in the samples of a micro-batch: `fixed + each * samples`."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.each * samples

    def __add__(self, other: Size) -> Size:
        return Size(self.fixed + other.fixed, self.each + other.each)


@dataclass(frozen=True, slots=True)
class Peak:
    """An amount that is affine for few samples and for many: its moment may be another one when there are more."""

    few: Size
    many: Size | Peak
    most: int
    """The most samples that are few."""

    def at(self, samples: float) -> float:
        return (self.few if samples <= self.most else self.many).at(samples)

    def __add__(self, other: Size) -> Peak:
        return Peak(self.few + other, self.many + other, self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One operator that launches work on the device."""

    name: str
    kind: str
    """What limits its speed: "matmul", "attention", "convolution", "recurrent" or "other"."""
    dtype: str
    flops: Size
    bytes: Size
    """Bytes read and written."""
    made: Size = Size()
    """Bytes of its results."""
    shape: tuple[Size, ...] = ()
    """Of a matmul: (batch, m, n, k); of a convolution likewise, with its groups as the batch. Of attention:
    (batch times heads, queries, keys, width of a head)."""
    steps: Size = Size()
    """Elements that a GPU computes one at a time, weighted by their work; 0 if only the bytes count."""
    copied: Size = Size()
    """Bytes that a library copies to another layout first, or back afterwards, besides `bytes`; a bias counts as one
    more copy of what it is added to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """Costs of one unit under one precision and one kind of activation checkpointing."""

    name: str
    like: str
    """Name of the first unit with identical costs; its own name if it is the first."""
    is_block: bool
    parameters: tuple[str, ...]
    """The parameters that the unit reads, by their first names."""
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    """Includes recomputation."""
    kept: Size
    """Bytes still allocated when the next unit starts: what backward needs, and the output."""
    output: Size
    """Bytes of the output, which a pipeline sends if it cuts here."""
    forward_peak: Size | Peak
    """Peak bytes of its forward pass, on top of what was allocated when it started."""
    backward_peak: Size | Peak
    """Peak bytes of its backward pass, on top of what all earlier units keep; what it keeps itself is included."""
    fresh_output: Size | None = None
    """Bytes of the output that the unit makes: an attention bias that all blocks pass on takes memory once. None if it
    was not measured: all of the output."""

    @property
    def made_output(self) -> Size:
        return self.output if self.fresh_output is None else self.fresh_output

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for units with identical costs. Calls of one module may differ: later ones may keep more or less."""
        return self.like, self.kept, self.output, self.made_output, self.forward_peak, self.backward_peak


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """Costs of all units in the order of their calls, the loss last."""

    precision: str
    units: tuple[UnitCosts, ...]
    recompute: str = "none"
    loss_in_model: bool = False
    """Whether the model computes the loss after its last call, and not the job's loss function."""

    def flops(self, samples: float) -> float:
        """FLOPs of forward and backward for `samples` samples."""
        return sum(k.flops.at(samples) for unit in self.units for k in (*unit.forward, *unit.backward))

    def recomputed(self, kind: str) -> ModelCosts:
        """The costs if blocks recompute everything (`full`), or all but matmuls and attention (`selective`)."""
        if kind == "none":
            return self
        made: dict[tuple[Any, ...], UnitCosts] = {}
        for unit in self.units:
            if unit.kind not in made:
                made[unit.kind] = _recomputed(unit, kind) if unit.is_block else unit
        units = tuple(replace(made[u.kind], name=u.name, parameters=u.parameters) for u in self.units)
        return replace(self, units=units, recompute=kind)

    def to_json(self) -> dict[str, Any]:
        """Of units identical to an earlier one, only the names are stored."""
        names = ("name", "like", "parameters")
        stored: dict[str, UnitCosts] = {}
        units = []
        for unit in self.units:
            if unit.like != unit.name and unit.kind == stored[unit.like].kind:
                units.append({name: getattr(unit, name) for name in names})
            else:
                stored[unit.like] = unit
                units.append(asdict(unit))
        found = {"precision": self.precision, "recompute": self.recompute, "units": units}
        return found | ({"loss_in_model": True} if self.loss_in_model else {})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelCosts:
        made: dict[str, UnitCosts] = {}
        units = []
        for values in document["units"]:
            own = {"name": values["name"], "parameters": tuple(values["parameters"])}
            if "kept" in values:
                made[values["like"]] = _unit({**values, **own})
            units.append(replace(made[values["like"]], **own))
        return cls(
            precision=document["precision"],
            recompute=document["recompute"],
            units=tuple(units),
            loss_in_model=document.get("loss_in_model", False),
        )


def _peak(values: Mapping[str, Any]) -> Size | Peak:
    if "few" not in values:
        return Size(**values)
    return Peak(Size(**values["few"]), _peak(values["many"]), values["most"])


def _unit(values: Mapping[str, Any]) -> UnitCosts:
    passes = {key: tuple(map(_kernel, values[key])) for key in ("forward", "backward")}
    sizes: dict[str, Size | Peak] = {key: Size(**values[key]) for key in ("kept", "output")}
    sizes |= {key: _peak(values[key]) for key in ("forward_peak", "backward_peak")}
    if values.get("fresh_output") is not None:
        sizes["fresh_output"] = Size(**values["fresh_output"])
    return UnitCosts(**{**values, **passes, **sizes})


def _kernel(values: Mapping[str, Any]) -> Kernel:
    sizes = {key: Size(**values.get(key, {})) for key in ("flops", "bytes", "made", "steps", "copied")}
    return Kernel(**{**values, **sizes, "shape": tuple(Size(**size) for size in values["shape"])})


def _recomputed(unit: UnitCosts, kind: str) -> UnitCosts:
    products = [place for place, kernel in enumerate(unit.forward) if kernel.kind != "other"]
    if kind == "selective":
        places = _kept_places(unit.forward)
        kept = [unit.forward[place].made for place in places]
        if places and all(kernel.name in _ADDED for kernel in unit.forward[places[-1] + 1 :]):
            kept.pop()  # the block's last branch, which is only added to the residual stream
        saved = [unit.forward[place] for place in {*products, *places}]
    else:
        kept, saved = [], []
    # Recomputation stops before the last matmul, because backward does not need its result.
    needed = unit.forward[: products[-1]] if products else unit.forward
    again = tuple(kernel for kernel in needed if kernel not in saved)
    return replace(
        unit,
        backward=(*again, *unit.backward),
        kept=sum(kept, start=unit.made_output),
        backward_peak=unit.backward_peak + unit.made_output,
    )


_ADDED = ("add", "add_", "_to_copy")
_DROPOUT = "native_dropout"


def _kept_places(forward: tuple[Kernel, ...]) -> list[int]:
    """Places of the kernels whose results are kept: products, but of a product with dropout what dropout made of it."""
    chosen = [place for place, kernel in enumerate(forward) if kernel.kind != "other" or kernel.name == _DROPOUT]
    after = [*(kernel.name for kernel in forward[1:]), ""]
    return [place for place in chosen if after[place] != _DROPOUT]
