"""One action of a rank in a pipeline: `2F0` is the forward pass of stage 2 on micro-batch 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import BadInput


class ScheduleError(BadInput):
    """A schedule that cannot be parsed, misses an action, or deadlocks."""


class Kind(StrEnum):
    """What is computed; the letters are those of PyTorch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass: input gradients, then weight gradients."""
    BACKWARD_INPUT = "I"
    """Gradients of the stage's inputs, which the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """Gradients of the stage's weights, which only the update waits for."""


_TEXT = re.compile(rf"(\d+)([{''.join(Kind)}])(\d+)", re.ASCII)


@dataclass(frozen=True)
class Action:
    """One pass of a stage on a micro-batch; `parse(str(action)) == action`."""

    stage: int
    kind: Kind
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        found = _TEXT.fullmatch(text)
        if found is None:
            kinds = ", ".join(Kind)
            raise ScheduleError(f"Cannot read the action {text!r}: write stage, kind ({kinds}), micro-batch, like 2F0.")
        return cls(int(found[1]), Kind(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The results of the action. B counts as I and W, so other stages do not see whether it was split."""
        if self.kind is not Kind.BACKWARD:
            return (self,)
        return tuple(Action(self.stage, kind, self.micro_batch) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))


Slot = tuple[Action, ...]
"""What a rank does in one time slot: nothing, one action, or two that may overlap."""
