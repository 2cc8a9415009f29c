"""What a model axis is, apart from how it runs: facts that any layer may ask for.

A model axis divides the model itself: its operators, its layers. An axis's file under `strategies/` states these facts,
and registering the axis enters them here. Nothing else compares the name of a model axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AxisTraits:
    """The facts of one model axis."""

    word: str
    """Its term in the strategy's text, as `tp` in `tp=4`."""
    mesh_name: str
    """The name of its dimension in the device mesh. Two axes of one name exclude each other."""
    place: int
    """Its place in the mesh: negative outside the data axis, positive inside. Ranks of the axis with the highest place
    are neighbours, so it gets the fastest link."""
    conflict: str = ""
    """Why it cannot be combined with another axis of the same mesh name."""
    suffixes: tuple[str, ...] = ()
    """What may follow the size, as `1f1b` in `pp=4:1f1b`."""
    default_suffix: str = ""
    suffix_name: str = "suffix"
    """What a suffix is called in messages."""
    staged: bool = False
    """Whether it cuts the model into stages of consecutive layers."""
    schedule: str = ""
    """The schedule of a staged axis without suffixes; otherwise the suffix names it."""
    splits_tensors: bool = False
    """Whether a rank holds parts of parameters, which an optimizer that reads whole tensors would not notice."""
    splits_activations: bool = False
    """Whether a rank computes parts of activations between layers, so that state kept in `forward` differs."""
    autocast: bool = True
    """Whether autocast reaches the layers that it divides."""
    one_process: bool = False
    """Whether it can also run in one process that has all the devices."""
    engines: tuple[str, ...] = ("torch",)
    """The engines that run it."""
    complexity: int = 10
    """Of two equally fast plans the one with less complexity is recommended."""
    config_fields: Mapping[str, str] = field(default_factory=dict)
    """For each framework whose config can name this axis, the field that holds its size."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each framework that it is not exported to, the reason; its ranks go to the data axis there."""


@dataclass(frozen=True)
class AxisTerm:
    """One model axis of a strategy, with its size: `pp=4:1f1b`."""

    word: str
    size: int
    suffix: str = ""

    @property
    def traits(self) -> AxisTraits:
        return MODEL_AXES[self.word]

    @property
    def schedule(self) -> str:
        """The order of micro-batches on a staged axis; "" for the others."""
        return self.suffix or self.traits.schedule

    @classmethod
    def of(cls, traits: AxisTraits, size: int) -> AxisTerm:
        return cls(traits.word, size, traits.default_suffix)

    def __str__(self) -> str:
        return f"{self.word}={self.size}" + (f":{self.suffix}" if self.suffix else "")


MODEL_AXES: dict[str, AxisTraits] = {}
"""The registered model axes by word, in the order of the strategy's text; `meshwright.strategies` fills it."""


def first_axes() -> tuple[AxisTraits, AxisTraits]:
    """The first registered axis inside the data axis and the first that has stages: what checks take unasked."""
    inner = next(traits for traits in MODEL_AXES.values() if not traits.staged)
    return inner, next(traits for traits in MODEL_AXES.values() if traits.staged)


def conflict(one: AxisTraits, other: AxisTraits) -> str:
    """Why two axes exclude each other; "" if they do not."""
    if one.mesh_name == other.mesh_name:
        return one.conflict or other.conflict or "both take the same mesh axis"
    return "both divide parameters" if one.splits_tensors and other.splits_tensors else ""


def normalised(terms: tuple[AxisTerm, ...]) -> tuple[AxisTerm, ...]:
    """The terms in the order of the strategy's text, with default suffixes; an axis of one rank is none."""
    order = list(MODEL_AXES)
    kept = [
        AxisTerm(term.word, term.size, term.suffix or term.traits.default_suffix) for term in terms if term.size > 1
    ]
    return tuple(sorted(kept, key=lambda term: order.index(term.word)))
