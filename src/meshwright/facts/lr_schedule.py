"""Step a job's learning-rate schedule with the arguments that its `step` takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from meshwright.errors import JobError

LOSS, COUNT = "loss", "count"
STEP, EPOCH, EVALUATION = EACH = ("step", "epoch", "evaluation")
"""After what a schedule is stepped."""


def advance(schedule: Any, *, updates: int, loss: Callable[[], float]) -> None:
    """Step a schedule: with nothing, with the mean loss, or with the number of updates (or epochs, or evaluations).

    timm's schedules also have `step_update`. They count epochs in one and updates in the other, and ignore one of them;
    both are called with the number of updates.
    """
    arguments = {LOSS: loss, COUNT: lambda: updates}
    schedule.step(*(arguments[kind]() for kind in _wanted(schedule.step) or ()))
    if callable(update := getattr(schedule, "step_update", None)):
        update(updates)


def refuse_schedule(schedule: Any, by: str = STEP) -> None:
    """Raise `JobError` if the arguments of a schedule's `step` are unknown, or if an epoch does not have them."""
    if not callable(getattr(schedule, "step", None)):
        raise JobError(f"Job(schedule=...) must give something with a step(), but it gave {type(schedule).__name__}.")
    if _wanted(schedule.step) is None:
        raise JobError(
            f"{type(schedule).__name__}.step{inspect.signature(schedule.step)} takes unknown arguments; "
            "a schedule is stepped with nothing, with the loss (step(metrics)) or with the number of updates."
        )
    if by == EPOCH and LOSS in (_wanted(schedule.step) or ()):
        raise JobError(
            f"{type(schedule).__name__}.step takes a loss, and an epoch has none of its own; "
            'give Job(schedule_by="evaluation") to step it with the loss of each evaluation.'
        )


def required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function that have no default."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _wanted(step: Callable[..., Any]) -> list[str] | None:
    """The arguments that `step` needs; None if they are unknown."""
    wanted = required(step)
    if not wanted:
        return []
    if len(wanted) > 1 or wanted[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return None
    name = wanted[0].name.lower()
    if any(word in name for word in ("metric", "loss")):
        return [LOSS]
    return [COUNT] if any(word in name for word in ("epoch", "step", "update", "iter")) or name in "tn" else None
