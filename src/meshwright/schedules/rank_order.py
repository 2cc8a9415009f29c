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
        self._pending: list[Action] = []  # input gradients whose weight gradients are still to be added

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slots)

    def forward(self, stage: int, times: int = 1) -> None:
        self._slots += [(self._next_forward(stage),) for _ in range(times)]

    def backward(self, stage: int, times: int = 1) -> None:
        self._slots += [(self._next_backward(stage, Kind.BACKWARD),) for _ in range(times)]

    def overlap(self, *, forward: int, backward: int) -> None:
        """Add a forward pass of one stage and a backward pass of another that may run at the same time."""
        self._slots.append((self._next_forward(forward), self._next_backward(backward, Kind.BACKWARD)))

    def backward_input(self, stage: int) -> None:
        action = self._next_backward(stage, Kind.BACKWARD_INPUT)
        self._pending.append(action)
        self._slots.append((action,))

    def backward_weight(self, stage: int | None = None, times: int = 1) -> None:
        """Add the oldest pending weight gradients, of one stage or of any; fewer if fewer are pending."""
        pending = [action for action in self._pending if stage in (None, action.stage)]
        for action in pending[:times]:
            self._pending.remove(action)
            self._slots.append((Action(action.stage, Kind.BACKWARD_WEIGHT, action.micro_batch),))

    def _next_forward(self, stage: int) -> Action:
        self._forwards[stage] += 1
        return Action(stage, Kind.FORWARD, self._forwards[stage] - 1)

    def _next_backward(self, stage: int, kind: Kind) -> Action:
        self._backwards[stage] += 1
        return Action(stage, kind, self._backwards[stage] - 1)
