"""Which candidates are also tried with a pieced loss."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

from meshwright.facts.model import HeadFacts
from meshwright.facts.plan import Plan
from meshwright.facts.strategy import Strategy

LARGE_LOGITS = 0.05
"""Share of a device's memory from which logits are worth computing in pieces."""


class PiecedCopies:
    """Which candidates are also tried with a pieced loss, from the logits of those that were evaluated."""

    def __init__(self, head: HeadFacts | None, room: float) -> None:
        """`room` is the memory of a device that a plan may safely use."""
        self._head, self._room, self._fits = head, room, False
        self._each: dict[Hashable, float] = {}
        """Bytes of logits for each sample of a micro-batch, by what divides them."""

    def added_to(self, candidates: Iterable[Strategy], losses: tuple[str, ...]) -> Iterator[Strategy]:
        """The candidates, each followed by its copy if it is worth a try once the candidate was evaluated."""
        for candidate in candidates:
            self._fits = False
            if "whole" in losses:
                yield candidate
            if "pieced" in losses and self._can(candidate) and (len(losses) == 1 or self._are_large(candidate)):
                yield replace(candidate, loss="pieced")

    def seen(self, plan: Plan) -> None:
        if plan.strategy.loss == "whole":
            size = plan.strategy.micro_batch or 1
            self._each[self._key(plan.strategy)] = plan.forecast.memory.get("logits", 0) / size
            self._fits = plan.forecast.peak <= self._room

    def _can(self, candidate: Strategy) -> bool:
        pieces = all(term.traits.pieces_loss for term in candidate.axes) and not candidate.traits.many_devices
        return self._head is not None and not self._head.needed_by and pieces

    def _are_large(self, candidate: Strategy) -> bool:
        """Whether the logits take much of the memory, and the whole loss does not fit safely."""
        return (
            not self._fits
            and self._each.get(self._key(candidate), 0.0) * (candidate.micro_batch or 1) > LARGE_LOGITS * self._room
        )

    def _key(self, s: Strategy) -> Hashable:
        return s.inner_axes, s.precision, s.compile
