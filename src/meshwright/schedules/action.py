"""One piece of a rank's work in a pipeline: `2F0` is the forward pass of stage 2 on micro-batch 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from meshwright.schedules.errors import ScheduleError


class Kind(StrEnum):
    """What is computed; the letters are PyTorch's."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass: for inputs, then for weights."""
    BACKWARD_INPUT = "I"
    """Gradients of the stage's inputs, which the stage before waits for."""
    BACKWARD_WEIGHT = "W"
    """Gradients of the stage's weights, which nobody waits for before the update."""


_TEXT = re.compile(rf"(\d+)([{''.join(Kind)}])(\d+)", re.ASCII)


@dataclass(frozen=True)
class Action:
    """`parse(str(action)) == action`."""

    stage: int
    kind: Kind
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        found = _TEXT.fullmatch(text)
        if found is None:
            kinds = ", ".join(Kind)
            raise ScheduleError(f"Cannot read the action {text!r}: write stage, kind ({kinds}), micro-batch, as 2F0.")
        return cls(int(found[1]), Kind(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """What is there once the action is done. Other stages do not see whether a backward pass was split."""
        if self.kind is not Kind.BACKWARD:
            return (self,)
        return tuple(Action(self.stage, kind, self.micro_batch) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))


Slot = tuple[Action, ...]
"""What a rank does at one place of its row: nothing, one action, or two that may overlap."""
