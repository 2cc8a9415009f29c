"""Import a DeepSpeed run's optimizer, schedule and progress into the form that the job's own would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.checkpoint.deepspeed import TrainingState
from meshwright.checkpoint.json_state import encode, encode_optimizer
from meshwright.checkpoint.manifest import OPTIMIZER
from meshwright.checkpoint.name_matching import ExpectedState, Match
from meshwright.checkpoint.parts import State, held_parts
from meshwright.errors import WrongCheckpoint
from meshwright.facts.data_axis import word_of_stage
from meshwright.facts.job import NamedParameters
from meshwright.facts.strategy import Strategy

FAMILY_KEYS = frozenset({"betas", "momentum", "alpha", "rho"})
"""Hyperparameters that tell one family of optimizers from another."""
ADVICE = "omit --job to import only the weights"


@dataclass(frozen=True)
class ImportedTraining:
    """What an import adds to the weights."""

    state: State
    run_state: dict[str, Any]
    """Fields of the manifest."""
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    """fp32 master weights, which replace the model's weights if those were in lower precision."""


def import_training(training: TrainingState, match: Match, expected: ExpectedState) -> ImportedTraining:
    """The optimizer's state under the job's names; an error if the job has another optimizer or schedule."""
    parameters = NamedParameters((n, p) for n, p in expected.model.named_parameters() if p.requires_grad)
    optimizer = expected.job.optimizer(parameters)
    names = {id(parameter): name for name, parameter in parameters.named()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    _refuse_other_optimizer(training, optimizer)
    to_job = {}
    for name in training.slots:
        renamed = match.prefix.apply(name)
        to_job[name] = expected.tied.get(renamed, renamed)
    if training.names is None:
        state, masters = _by_order(training, groups, {n: tuple(p.shape) for n, p in parameters.named()})
    else:
        state, masters = {}, {}
        _refuse_other_groups(groups, [[to_job.get(name, name) for name in group] for group in training.names])
        for name, slots in training.slots.items():
            state |= {f"{OPTIMIZER}{to_job[name]}/{key}": held for key, held in slots.items()}
    return ImportedTraining(state, _run_state(training, optimizer, groups, expected), masters)


def _by_order(
    training: TrainingState, groups: list[list[str]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[State, dict[str, torch.Tensor]]:
    """Match a folder that numbers its parameters: by the job's order, with matching shapes."""
    names = [name for group in groups for name in group]
    if len(names) != len(training.unnamed):
        raise WrongCheckpoint(
            f"The folder's optimizer has {len(training.unnamed)} parameters, the job's {len(names)}; {ADVICE}."
        )
    state: State = {}
    masters: dict[str, torch.Tensor] = {}
    for name, (master, slots) in zip(names, training.unnamed, strict=True):
        for key, value in slots.items():
            if torch.is_tensor(value) and value.dim() and tuple(value.shape) != shapes[name]:
                raise WrongCheckpoint(
                    f"The folder's optimizer has {key} of shape {tuple(value.shape)} where the job has {name} of shape "
                    f"{shapes[name]}, so their orders differ; {ADVICE}."
                )
            if torch.is_tensor(value):
                state[f"{OPTIMIZER}{name}/{key}"] = held_parts(value)
        if master is not None:
            masters[name] = master
    return state, masters


def _refuse_other_optimizer(training: TrainingState, optimizer: Optimizer) -> None:
    own = FAMILY_KEYS & optimizer.param_groups[0].keys()
    found = FAMILY_KEYS & training.groups[0].keys()
    if own != found:
        raise WrongCheckpoint(
            f"The folder's optimizer has {' and '.join(sorted(found)) or 'no momentum'}, but the job's is "
            f"{type(optimizer).__name__}; {ADVICE}."
        )
    if len(training.groups) != len(optimizer.param_groups):
        raise WrongCheckpoint(
            f"The folder's optimizer has {len(training.groups)} parameter groups, the job's "
            f"{len(optimizer.param_groups)}; {ADVICE}."
        )


def _refuse_other_groups(own: list[list[str]], found: list[list[str]]) -> None:
    for number, (mine, theirs) in enumerate(zip(own, found, strict=True)):
        if extra := sorted(set(theirs) - set(mine)):
            raise WrongCheckpoint(
                f"Group {number} of the folder's optimizer has {extra[0]}, which the job's does not; {ADVICE}."
            )


def _run_state(
    training: TrainingState, optimizer: Optimizer, groups: list[list[str]], expected: ExpectedState
) -> dict[str, Any]:
    own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    values = [
        mine | {k: v for k, v in theirs.items() if k in mine or k == "initial_lr"}
        for mine, theirs in zip(own, training.groups, strict=True)
    ]
    strategy = Strategy(data=word_of_stage(training.stage), data_size=training.ranks, engine="deepspeed")
    return {
        **{"step": training.step, "samples": training.samples, "ranks": training.ranks, "strategy": str(strategy)},
        "optimizer": encode_optimizer(optimizer, groups, values),
        "schedule": _schedule(training, optimizer, expected),
        "loss_scale": training.loss_scale,
    }


def _schedule(training: TrainingState, optimizer: Optimizer, expected: ExpectedState) -> dict[str, Any] | None:
    """The job's schedule, if the folder's state has the same fields."""
    schedule = expected.job.schedule(optimizer) if expected.job.schedule else None
    found = dict(training.schedule or {})
    if schedule is None and not found:
        return None
    own = schedule.state_dict().keys() if schedule is not None else set()
    if set(own) != set(found):
        raise WrongCheckpoint(
            f"The folder's schedule keeps {', '.join(sorted(found)) or 'nothing'}, but the job's "
            f"{type(schedule).__name__ if schedule else 'schedule'} keeps {', '.join(sorted(own)) or 'nothing'}; "
            f"{ADVICE}."
        )
    return {"class": type(schedule).__name__, "state": encode(found, "The schedule")}
