"""What a data strategy is, apart from how it runs: facts that any layer may ask for.

A strategy's file under `strategies/` states them, and registering the strategy enters them here. Nothing else compares
the name of a data strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class DataTraits:
    """The facts of one data strategy. The defaults are those of whole copies on every rank."""

    word: str
    """Its term in the strategy's text."""
    aliases: tuple[str, ...] = ()
    """Other words that mean the same; they are read, and never printed."""
    variants: Mapping[str, DataTraits] = field(default_factory=dict)
    """The facts under each suffix of the term, as in `fsdp:grad-op`."""
    sized: bool = True
    """Whether the term takes a number of ranks, as in `ddp=4`; else the data axis is one rank."""
    hybrid: bool = False
    """Whether that number is replicas x shards, as in `hsdp=2x4`."""
    one_process: bool = False
    """Whether one process trains the whole model, so that no other axis can divide it."""
    shards: tuple[State, ...] = ()
    """The states that are divided over the shards; every rank has the others whole."""
    gathers: bool = False
    """Whether forward computes with gathered copies in the place of the parameters."""
    reshards: bool = False
    """Whether gathered parameters are freed after forward and gathered again for backward."""
    gradients_rest: bool = False
    """Whether gradients keep their memory between steps."""
    zero_stage: int | None = None
    """The stage of DeepSpeed's ZeRO that does the same; None where none does."""
    foreign: bool = False
    """Whether other frameworks have it, or something to approximate it by; `export` refuses it where they do not."""
    planned: bool = True
    """Whether `plan` considers it unasked."""
    compared: bool = True
    """Whether `compare` and `verify` run it unasked."""
    complexity: int = 1
    """Of two equally fast plans the one with less complexity is recommended; `single` has 0."""

    @property
    def alone(self) -> bool:
        """Whether it is one process with one device."""
        return self.one_process and not self.sized

    @property
    def many_devices(self) -> bool:
        """Whether one process computes on all devices of the data axis."""
        return self.one_process and self.sized


NO_DATA_AXIS = DataTraits(word="", sized=False, zero_stage=0, foreign=True, complexity=0)
"""Of a strategy that names none: the axes of the model take all ranks, or `resolve` names one."""

DATA_AXES: dict[str, DataTraits] = {}
"""The registered data strategies by word; `meshwright.strategies` fills it."""


def find_traits(word: str | None, variant: str = "") -> DataTraits:
    """The facts of a registered data strategy, or of none."""
    traits = NO_DATA_AXIS if word is None else DATA_AXES[word]
    return traits.variants.get(variant, traits) if variant else traits


def usual_terms(chosen: Callable[[DataTraits], bool], hybrids: Sequence[str]) -> Iterator[str]:
    """The terms of all data strategies and variants that are chosen; hybrids in the sizes given, as `2x4`."""
    for word, base in DATA_AXES.items():
        for suffix, traits in {"": base, **base.variants}.items():
            if chosen(traits):
                yield from [f"{word}={size}" for size in hybrids] if traits.hybrid else [f"{word}:{suffix}".rstrip(":")]


def word_of_stage(stage: int) -> str:
    """The data strategy that a stage of ZeRO is."""
    return next(word for word, traits in DATA_AXES.items() if traits.zero_stage == stage)
