"""Builds the order of one rank."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.action import Action, Kind, Slot


class RankOrder:
    """Numbers micro-batches: each stage processes them in order, so an algorithm only names stages and kinds."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._weightless: list[Action] = []

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slots)

    def forward(self, stage: int) -> None:
        self._slots.append((self._next_forward(stage),))

    def backward(self, stage: int) -> None:
        self._slots.append((self._next_backward(stage, Kind.BACKWARD),))

    def overlap(self, *, forward: int, backward: int) -> None:
        """Add a forward pass of one stage and a backward pass of another that may run at the same time."""
        self._slots.append((self._next_forward(forward), self._next_backward(backward, Kind.BACKWARD)))

    def backward_input(self, stage: int) -> None:
        action = self._next_backward(stage, Kind.BACKWARD_INPUT)
        self._weightless.append(action)
        self._slots.append((action,))

    def backward_weight(self, stage: int | None = None) -> None:
        """Add the oldest pending weight gradient, of one stage or of any; do nothing if none is pending."""
        pending = (action for action in self._weightless if stage in (None, action.stage))
        if oldest := next(pending, None):
            self._weightless.remove(oldest)
            self._slots.append((Action(oldest.stage, Kind.BACKWARD_WEIGHT, oldest.micro_batch),))

    def _next_forward(self, stage: int) -> Action:
        self._forwards[stage] += 1
        return Action(stage, Kind.FORWARD, self._forwards[stage] - 1)

    def _next_backward(self, stage: int, kind: Kind) -> Action:
        self._backwards[stage] += 1
        return Action(stage, kind, self._backwards[stage] - 1)
