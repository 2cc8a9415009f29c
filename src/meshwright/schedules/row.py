"""One rank's order in the making."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.action import Action, Kind, Slot


class Row:
    """Every stage takes its micro-batches in order, so an algorithm says stages and kinds, and this numbers them."""

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
        """A forward pass of one stage and a backward pass of another that may run at the same time."""
        self._slots.append((self._next_forward(forward), self._next_backward(backward, Kind.BACKWARD)))

    def backward_input(self, stage: int) -> None:
        action = self._next_backward(stage, Kind.BACKWARD_INPUT)
        self._weightless.append(action)
        self._slots.append((action,))

    def backward_weight(self, stage: int | None = None) -> None:
        """For the oldest backward pass that lacks its weights, of one stage or of any; nothing where none does."""
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
