"""Facts about data strategies that every layer may read.

A strategy's file under `strategies/` states its facts, and registering the strategy enters them here. No other code
compares the name of a data strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class DataTraits:
    """Facts about one data strategy. The defaults describe whole copies on every rank."""

    word: str
    """Its term in the strategy's text."""
    aliases: tuple[str, ...] = ()
    """Other words with the same meaning; they are read, but never printed."""
    variants: Mapping[str, DataTraits] = field(default_factory=dict)
    """Facts under each suffix of the term, such as `fsdp:grad-op`."""
    sized: bool = True
    """Whether the term takes a number of ranks, as in `ddp=4`; if not, the data axis has one rank."""
    hybrid: bool = False
    """Whether that number is replicas x shards, as in `hsdp=2x4`."""
    one_process: bool = False
    """Whether one process trains the whole model, so that no other axis can divide it."""
    shards: tuple[State, ...] = ()
    """The states that are sharded; every rank has whole copies of the others."""
    gathers: bool = False
    """Whether forward computes with gathered copies of the parameters."""
    reshards: bool = False
    """Whether gathered parameters are freed after forward and gathered again for backward."""
    gradients_rest: bool = False
    """Whether gradients keep their memory between steps."""
    zero_stage: int | None = None
    """The equivalent stage of DeepSpeed's ZeRO, if any."""
    foreign: bool = False
    """Whether other frameworks have it or an approximation of it; if not, `export` refuses it."""
    planned: bool = True
    """Whether `plan` considers it by default."""
    compared: bool = True
    """Whether `compare` and `verify` run it by default."""
    complexity: int = 1
    """Of two equally fast plans the one with less complexity is recommended; `single` has 0."""

    @property
    def alone(self) -> bool:
        """Whether it trains in one process on one device."""
        return self.one_process and not self.sized

    @property
    def many_devices(self) -> bool:
        """Whether one process computes on all devices of the data axis."""
        return self.one_process and self.sized


NO_DATA_AXIS = DataTraits(word="", sized=False, zero_stage=0, foreign=True, complexity=0)
"""For a strategy without a data axis: the model axes take all ranks, or `resolve` adds one."""

DATA_AXES: dict[str, DataTraits] = {}
"""The registered data strategies by word; `meshwright.strategies` fills it."""


def find_traits(word: str | None, variant: str = "") -> DataTraits:
    """The facts of a registered data strategy; None means no data axis."""
    traits = NO_DATA_AXIS if word is None else DATA_AXES[word]
    return traits.variants.get(variant, traits) if variant else traits


def usual_terms(chosen: Callable[[DataTraits], bool], hybrids: Sequence[str]) -> Iterator[str]:
    """The terms of all chosen data strategies and variants; hybrids in the given sizes, such as `2x4`."""
    for word, base in DATA_AXES.items():
        for suffix, traits in {"": base, **base.variants}.items():
            if chosen(traits):
                yield from [f"{word}={size}" for size in hybrids] if traits.hybrid else [f"{word}:{suffix}".rstrip(":")]


def word_of_stage(stage: int) -> str:
    """The data strategy that is equivalent to a stage of ZeRO."""
    return next(word for word, traits in DATA_AXES.items() if traits.zero_stage == stage)
