"""The table of pipeline schedules. To add one, write its order and add a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import UnknownTerm
from meshwright.facts.grammar import nearest
from meshwright.schedules import folded, looped, plain
from meshwright.schedules.action import Slot
from meshwright.schedules.schedule import Placement, Shape


@dataclass(frozen=True, kw_only=True)
class Family:
    """All schedules with one name, for any number of ranks and micro-batches."""

    order: Callable[[int, Shape], tuple[Slot, ...]]
    """The slots of a rank, in order."""
    virtual: int = 1
    """Default number of stages per rank."""
    virtual_free: bool = False
    """Whether the number of stages per rank can be chosen."""
    placement: Placement = "loop"
    allows: Callable[[int, int], bool] = lambda ranks, micro_batches: True
    """Whether this many ranks can run this many micro-batches; the rules are those of PyTorch's schedule class."""
    demand: str = "at least 1"
    """The same rule in words: how many micro-batches it needs."""


def _even_rounds(ranks: int, micro_batches: int) -> bool:
    return looped.round_size(ranks, micro_batches) is not None


_ROUNDS = "a multiple of its number of rounds (micro-batches // ranks)"

FAMILIES: dict[str, Family] = {
    "layers": Family(order=plain.layers),
    "gpipe": Family(order=plain.gpipe),
    "1f1b": Family(
        order=plain.one_f_one_b,
        allows=lambda ranks, micro_batches: micro_batches >= ranks,
        demand="at least as many as ranks",
    ),
    "interleaved": Family(order=looped.interleaved, virtual=2, virtual_free=True, allows=_even_rounds, demand=_ROUNDS),
    "zb": Family(order=looped.zero_bubble, virtual_free=True, allows=_even_rounds, demand=_ROUNDS),
    "zbv": Family(order=folded.zero_bubble_v, virtual=2, placement="v"),
    "dualpipev": Family(
        order=folded.dual_pipe_v,
        virtual=2,
        placement="v",
        allows=lambda ranks, micro_batches: micro_batches >= 2 * ranks,
        demand="at least as many as stages (two on each rank)",
    ),
}


def find_family(name: str) -> Family:
    """The family with this name; the error suggests the nearest one."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = nearest(name, FAMILIES)
    hint = f"; did you mean {near!r}?" if near else "."
    raise UnknownTerm(f"Unknown schedule {name!r}{hint} Valid: {', '.join(FAMILIES)}.")
