"""The table of pipeline schedules. To add one, write its order and add a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import UnknownTerm
from meshwright.facts.grammar import nearest
from meshwright.schedules import orders
from meshwright.schedules.action import Slot
from meshwright.schedules.schedule import Placement, ScheduleShape


@dataclass(frozen=True, kw_only=True)
class Family:
    """All schedules with one name, for any number of ranks and micro-batches."""

    order: Callable[[int, ScheduleShape], tuple[Slot, ...]]
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
    torch_class: str = "ScheduleGPipe"
    """The class of PyTorch's pipelining that runs it."""
    one_at_a_time: bool = False
    """Whether a micro-batch leaves the pipeline before the next one enters."""
    splits_backward: bool = False
    """Whether weight gradients are delayed."""
    gap_divisor: int = 1
    """In each step a rank waits for the other ranks' work on one micro-batch, divided by this."""
    in_flight: Callable[[int, int, int], int] | None = None
    """Micro-batches whose activations a rank keeps, from rank, ranks and micro-batches; None: it must be counted."""
    searched: bool = False
    """Whether the planner considers it by default. `gpipe` holds more than `1f1b` and is no faster; `zb` is between
    `1f1b` and `zbv`."""
    complexity: int = 2
    """Of two equally fast plans, the one with the lower complexity is recommended."""


def _even_rounds(ranks: int, micro_batches: int) -> bool:
    return orders.round_size(ranks, micro_batches) is not None


_ROUNDS = "a multiple of its number of rounds (micro-batches // ranks)"

FAMILIES: dict[str, Family] = {
    "layers": Family(order=orders.layers, one_at_a_time=True, complexity=0, in_flight=lambda rank, ranks, count: 1),
    "gpipe": Family(order=orders.gpipe, complexity=0, in_flight=lambda rank, ranks, count: count),
    "1f1b": Family(
        order=orders.one_f_one_b,
        torch_class="Schedule1F1B",
        searched=True,
        complexity=0,
        in_flight=lambda rank, ranks, count: min(count, ranks - rank),
        allows=lambda ranks, micro_batches: micro_batches >= ranks,
        demand="at least as many as ranks",
    ),
    "interleaved": Family(
        order=orders.interleaved,
        torch_class="ScheduleInterleaved1F1B",
        virtual=2,
        virtual_free=True,
        allows=_even_rounds,
        demand=_ROUNDS,
        gap_divisor=2,
        searched=True,
    ),
    # Weight gradients, about a third of the work, fill the gaps.
    "zb": Family(
        order=orders.zero_bubble,
        torch_class="ScheduleInterleavedZeroBubble",
        virtual_free=True,
        allows=_even_rounds,
        demand=_ROUNDS,
        splits_backward=True,
        gap_divisor=3,
    ),
    "zbv": Family(
        order=orders.zero_bubble_v,
        torch_class="ScheduleZBVZeroBubble",
        virtual=2,
        placement="v",
        splits_backward=True,
        gap_divisor=6,
        searched=True,
    ),
    "dualpipev": Family(
        order=orders.dual_pipe_v,
        torch_class="ScheduleDualPipeV",
        virtual=2,
        placement="v",
        splits_backward=True,
        gap_divisor=6,
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
