"""Facts about model axes that every layer may read.

A model axis divides the model itself: its operators or its layers. An axis's file under `strategies/` states its facts,
and registering the axis enters them here. No other code compares the name of a model axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AxisTraits:
    """Facts about one model axis."""

    word: str
    """Its term in the strategy's text, such as `tp` in `tp=4`."""
    mesh_name: str
    """The name of its dimension in the device mesh. Two axes with the same name exclude each other."""
    place: int
    """Its place in the mesh: negative outside the data axis, positive inside. Ranks of the axis with the highest place
    are neighbours, so it gets the fastest link."""
    conflict: str = ""
    """Why it cannot be combined with another axis of the same mesh name."""
    suffixes: tuple[str, ...] = ()
    """What may follow the size, such as `1f1b` in `pp=4:1f1b`."""
    default_suffix: str = ""
    suffix_name: str = "suffix"
    """The word for a suffix in messages."""
    staged: bool = False
    """Whether it cuts the model into stages of consecutive layers."""
    schedule: str = ""
    """The schedule of a staged axis without suffixes; otherwise the suffix is the schedule."""
    splits_tensors: bool = False
    """Whether a rank holds parts of parameters, without an optimizer that reads whole tensors noticing."""
    splits_batch: bool = False
    """Whether its ranks are data ranks with different samples. It then divides the data axis instead of a copy of the
    model: parameters that it does not cut are replicated or sharded over all data ranks."""
    splits_activations: bool = False
    """Whether a rank computes parts of activations between layers, so that state kept in `forward` differs."""
    shares_gradients: bool = False
    """Whether its ranks hold all parameters and compute shares of their gradients. The data strategy then reduces and
    shards over this axis too, which stands right inside the data axis in the mesh."""
    autocast: bool = True
    """Whether autocast works in the layers that it divides."""
    compiles: bool = False
    """Whether torch.compile works on the blocks of a model that it divides."""
    pieces_loss: bool = False
    """Whether the output layer and the loss can run in pieces."""
    float8: bool = False
    """Whether the layers that it divides can multiply in float8."""
    one_process: bool = False
    """Whether it can also run in one process with all devices."""
    engines: tuple[str, ...] = ("torch",)
    """The engines that run it."""
    complexity: int = 10
    """Of two equally fast plans the one with less complexity is recommended."""
    config_fields: Mapping[str, str] = field(default_factory=dict)
    """For each framework whose config can name this axis, the field that holds its size."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """For each framework that it is not exported to, the reason; its ranks then go to the data axis."""


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
    """The first registered axis without stages and the first with stages, which checks use by default."""
    inner = next(traits for traits in MODEL_AXES.values() if not traits.staged)
    return inner, next(traits for traits in MODEL_AXES.values() if traits.staged)


def conflict(one: AxisTraits, other: AxisTraits) -> str:
    """Why two axes exclude each other; "" if they do not."""
    if one.mesh_name == other.mesh_name:
        return one.conflict or other.conflict or "both take the same mesh axis"
    if one.splits_batch != other.splits_batch:
        return ""  # they cut different parameters
    return "both divide parameters" if one.splits_tensors and other.splits_tensors else ""


def normalised(terms: tuple[AxisTerm, ...]) -> tuple[AxisTerm, ...]:
    """The terms in the order of the strategy's text, with default suffixes and without axes of one rank."""
    order = list(MODEL_AXES)
    kept = (
        AxisTerm(term.word, term.size, term.suffix or term.traits.default_suffix) for term in terms if term.size > 1
    )
    return tuple(sorted(kept, key=lambda term: order.index(term.word)))
