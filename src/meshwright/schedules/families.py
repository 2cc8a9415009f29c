"""The schedules that Meshwright knows, as a table. Adding one is an order of its own and a row here."""

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
    """Schedules of one name, whatever their size."""

    order: Callable[[int, Shape], tuple[Slot, ...]]
    """What a rank does, in order."""
    virtual: int = 1
    """Stages on each rank, where nobody asks for another number."""
    virtual_free: bool = False
    """Whether somebody may."""
    placement: Placement = "loop"
    allows: Callable[[int, int], bool] = lambda ranks, micro_batches: True
    """Whether so many ranks can run so many micro-batches: what PyTorch's class of that schedule demands."""
    demand: str = "at least 1"
    """The same in words: the micro-batches that it needs."""
    torch_class: str = "ScheduleGPipe"
    """The class of PyTorch's pipelining that runs it."""
    one_at_a_time: bool = False
    """Whether a micro-batch leaves the pipeline before the next one enters."""
    splits_backward: bool = False
    """Whether the weights' part of a backward pass is put off."""
    gap_divisor: int = 1
    """In a step a rank waits for the other ranks' work on one micro-batch, divided by this."""
    in_flight: Callable[[int, int, int], int] | None = None
    """Micro-batches that a rank keeps activations of, from rank, ranks and micro-batches; None: the schedule tells."""
    searched: bool = False
    """Whether the planner considers it unasked. `gpipe` holds more than `1f1b` and is no faster, and `zb` is between
    `1f1b` and `zbv`."""
    complexity: int = 2
    """Of two equally fast plans the one with less complexity is recommended."""


def _even_rounds(ranks: int, micro_batches: int) -> bool:
    return looped.round_size(ranks, micro_batches) is not None


_ROUNDS = "a multiple of its rounds, which are the micro-batches // ranks"

FAMILIES: dict[str, Family] = {
    "layers": Family(order=plain.layers, one_at_a_time=True, complexity=0, in_flight=lambda rank, ranks, count: 1),
    "gpipe": Family(order=plain.gpipe, complexity=0, in_flight=lambda rank, ranks, count: count),
    "1f1b": Family(
        order=plain.one_f_one_b,
        torch_class="Schedule1F1B",
        searched=True,
        complexity=0,
        in_flight=lambda rank, ranks, count: min(count, ranks - rank),
        allows=lambda ranks, micro_batches: micro_batches >= ranks,
        demand="at least as many as ranks",
    ),
    "interleaved": Family(
        order=looped.interleaved,
        torch_class="ScheduleInterleaved1F1B",
        virtual=2,
        virtual_free=True,
        allows=_even_rounds,
        demand=_ROUNDS,
        gap_divisor=2,
        searched=True,
    ),
    # The weights' part of backward, about a third of the work, fills the gaps.
    "zb": Family(
        order=looped.zero_bubble,
        torch_class="ScheduleInterleavedZeroBubble",
        virtual_free=True,
        allows=_even_rounds,
        demand=_ROUNDS,
        splits_backward=True,
        gap_divisor=3,
    ),
    "zbv": Family(
        order=folded.zero_bubble_v,
        torch_class="ScheduleZBVZeroBubble",
        virtual=2,
        placement="v",
        splits_backward=True,
        gap_divisor=6,
        searched=True,
    ),
    "dualpipev": Family(
        order=folded.dual_pipe_v,
        torch_class="ScheduleDualPipeV",
        virtual=2,
        placement="v",
        splits_backward=True,
        gap_divisor=6,
        allows=lambda ranks, micro_batches: micro_batches >= 2 * ranks,
        demand="at least as many as stages, which are two on each rank",
    ),
}


def find_family(name: str) -> Family:
    """The family of a name; an error with a guess where there is none."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = nearest(name, FAMILIES)
    hint = f"; did you mean {near!r}?" if near else "."
    raise UnknownTerm(f"Unknown schedule {name!r}{hint} Valid: {', '.join(FAMILIES)}.")
