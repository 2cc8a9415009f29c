"""A foreign schedule for a job: its state if the job has the same schedule, or the job's own at the same step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from meshwright.checkpoint.json_state import encode
from meshwright.errors import BadInput, WrongCheckpoint

SOURCE, JOB = "source", "job"
CHOICES = (SOURCE, JOB)
INTERNAL = frozenset({"verbose", "_is_initial", "_get_lr_called_within_step", "_last_lr", "_step_count"})
"""Bookkeeping of torch's schedules, which differs between releases."""
MOVING = frozenset({"last_epoch", "lr_lambdas", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"})
"""What steps change, and a lambda's state, which is none."""
ADVICE = "`--schedule job` takes the job's schedule at this step, `--weights-only` only the weights"


@dataclass(frozen=True)
class ImportedSchedule:
    state: dict[str, Any] | None
    """Class and state for the manifest."""
    rates: list[dict[str, Any]] | None = None
    """Each group's learning rates, if the job's schedule sets them."""
    notes: tuple[str, ...] = ()


def import_schedule(
    found: Mapping[str, Any] | None, schedule: Any, optimizer: Optimizer, step: int, choice: str | None
) -> ImportedSchedule:
    """`schedule` is the job's, just made for `optimizer`, or None. `choice` decides where the two differ."""
    if choice not in (None, *CHOICES):
        raise BadInput(f"--schedule must be one of {', '.join(CHOICES)}, not {choice!r}.")
    if not found or choice == JOB:
        return _own(bool(found), schedule, optimizer, step)
    if schedule is None:
        raise WrongCheckpoint(
            f"The source has a schedule ({_kept(found)}), but the job has none, so the learning rate would stay as it "
            "is; add Job(schedule=), or drop the schedule by `--schedule job`."
        )
    kind, own = type(schedule).__name__, schedule.state_dict()
    if own.keys() - INTERNAL != found.keys() - INTERNAL:
        raise WrongCheckpoint(
            f"The source's schedule keeps {_kept(found)}, but the job's {kind} keeps {_kept(own)}; {ADVICE}."
        )
    count = found.get("last_epoch")
    if choice is None and count != step:
        raise WrongCheckpoint(
            f"The source's schedule was stepped {count} times in {step} steps, but a job's schedule is stepped once a "
            "step (a script may step it once an epoch; Accelerate steps it once per process). `--schedule source` "
            f"takes its state as it is; {ADVICE}."
        )
    settings = [key for key in own if key not in INTERNAL | MOVING and not key.startswith("_")]
    changed = [key for key in settings if own[key] != found[key]]
    notes = tuple(f"schedule: {key} is {found[key]!r}, as at the source; the job has {own[key]!r}" for key in changed)
    state = {key: found.get(key, value) for key, value in own.items()}
    return ImportedSchedule({"class": kind, "state": encode(state, "The schedule")}, notes=notes)


def _own(has_other: bool, schedule: Any, optimizer: Optimizer, step: int) -> ImportedSchedule:
    """The job's own schedule at a step."""
    dropped = ("schedule: the source's is left out",) if has_other else ()
    if schedule is None:
        return ImportedSchedule(None, notes=dropped)
    kind = type(schedule).__name__
    try:
        with warnings.catch_warnings():  # the optimizer takes no steps here
            warnings.simplefilter("ignore")
            for _ in range(step):
                schedule.step()
    except TypeError as error:
        raise WrongCheckpoint(
            f"The source has no schedule, and the job's {kind} cannot be set to step {step}: {error}; `--weights-only` "
            "imports only the weights."
        ) from None
    rates: list[dict[str, Any]] = [
        {key: group[key] for key in ("lr", "initial_lr") if key in group} for group in optimizer.param_groups
    ]
    state = {"class": kind, "state": encode(schedule.state_dict(), "The schedule")}
    return ImportedSchedule(state, rates, (*dropped, f"schedule: the job's {kind}, set to step {step}"))


def _kept(state: Mapping[str, Any]) -> str:
    return ", ".join(sorted(state.keys() - INTERNAL)) or "nothing"
