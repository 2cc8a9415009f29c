"""A foreign run's optimizer and progress in the form that the job's own would have: by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.checkpoint.foreign.training import Slots, TrainingState
from meshwright.checkpoint.json_state import encode_optimizer
from meshwright.checkpoint.manifest import OPTIMIZER
from meshwright.checkpoint.name_matching import ExpectedState, Match
from meshwright.checkpoint.parameter_order import Names, groups_of, names_by_order
from meshwright.checkpoint.parts import HeldParts, State, held_parts
from meshwright.checkpoint.schedule_import import import_schedule
from meshwright.checkpoint.state import NUMBERS
from meshwright.errors import WrongCheckpoint
from meshwright.facts.job import NamedParameters

FAMILY_KEYS = frozenset({"betas", "momentum", "alpha", "rho"})
"""Hyperparameters that tell one family of optimizers from another."""
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How an optimizer computes, which is the job's choice."""
RATES = frozenset({"lr", "initial_lr"})
ADVICE = "`--weights-only` imports only the weights"


@dataclass(frozen=True)
class ImportedTraining:
    """What an import adds to the weights."""

    state: State
    run_state: dict[str, Any]
    """Fields of the manifest."""
    masters: dict[str, torch.Tensor]
    """fp32 master weights, which replace the model's weights if those were in lower precision."""
    notes: tuple[str, ...]
    """What was assumed, changed or left out, one line each."""


def import_training(
    training: TrainingState,
    match: Match,
    expected: ExpectedState,
    *,
    step: int | None = None,
    schedule: str | None = None,
) -> ImportedTraining:
    """The training's state under the job's names; an error if the job has another optimizer or schedule.

    `step` replaces the source's count; `schedule` says whose schedule to take where the two differ.
    """
    parameters = NamedParameters((n, p) for n, p in expected.model.named_parameters() if p.requires_grad)
    optimizer = expected.job.optimizer(parameters)
    own = groups_of(optimizer, parameters)
    _refuse_other_optimizer(training, optimizer)
    by_name = _by_name(training, match, expected, own)
    notes = [*_refuse_other_parameters(by_name, own, expected), *_decoupling(training, optimizer)]
    slots = {name: by_name[name].slots for group in own for name in group}
    step, told = _step(step, training, slots)
    rule = expected.job.schedule(optimizer) if expected.job.schedule else None
    before = [_values(group) for group in optimizer.param_groups]
    # DeepSpeed does not step its schedule when fp16 overflows: there, counts may differ.
    choice = schedule or ("source" if "deepspeed" in training.strategy and training.schedule else None)
    imported = import_schedule(training.schedule, rule, optimizer, step, choice)
    groups, changed = _groups(by_name, own, before, imported.rates)
    samples = training.samples
    if samples is None:
        samples = step * expected.job.global_batch
        told.append(f"data: continues at sample {samples}, which is {step} steps of {expected.job.global_batch}")
    run_state = {
        **{"step": step, "samples": samples, "ranks": training.ranks, "strategy": training.strategy},
        "optimizer": encode_optimizer(optimizer, own, groups),
        "schedule": imported.state,
        "loss_scale": training.loss_scale,
    }
    masters = {name: one.master for name, one in by_name.items() if one.master is not None}
    state = {f"{OPTIMIZER}{name}/{key}": held for name, one in slots.items() for key, held in _stored(name, one)}
    return ImportedTraining(state, run_state, masters, (*notes, *told, *changed, *imported.notes))


@dataclass(frozen=True)
class _Parameter:
    """One parameter of the source's optimizer."""

    slots: Slots
    values: Mapping[str, Any]
    master: torch.Tensor | None = None


def _by_name(training: TrainingState, match: Match, expected: ExpectedState, own: Names) -> dict[str, _Parameter]:
    """The source's parameters under the job's names."""
    if training.names is None:
        names = names_by_order(training, expected, own, ADVICE)
        masters = iter(training.masters)
        return {
            name: _Parameter(slots, values, next(masters, None))
            for group, numbered, values in zip(names, training.numbered, training.groups, strict=True)
            for name, slots in zip(group, numbered, strict=True)
        }
    found = {}
    for group, values in zip(training.names, training.groups, strict=True):
        for name in group:
            renamed = match.rename(name)
            found[expected.tied.get(renamed, renamed)] = _Parameter(training.slots.get(name, {}), values)
    return found


def _refuse_other_optimizer(training: TrainingState, optimizer: Optimizer) -> None:
    own = FAMILY_KEYS & optimizer.param_groups[0].keys()
    found = FAMILY_KEYS & training.groups[0].keys()
    if own != found:
        raise WrongCheckpoint(
            f"The source's optimizer has {' and '.join(sorted(found)) or 'no momentum'}, but the job's is "
            f"{type(optimizer).__name__}; {ADVICE}."
        )


def _decoupling(training: TrainingState, optimizer: Optimizer) -> Iterator[str]:
    """Adam and AdamW have the same state, and differ in what weight decay means."""
    own = optimizer.param_groups[0].get("decoupled_weight_decay")
    if own is None or not any(group.get("weight_decay") for group in training.groups):
        return
    found = training.groups[0].get("decoupled_weight_decay")
    if found is None:
        own_name = type(optimizer).__name__
        yield f"optimizer: the source does not say whether it is Adam or AdamW; the job's {own_name} is assumed"
    elif found != own:
        raise WrongCheckpoint(
            f"The source's optimizer is {'AdamW' if found else 'Adam'} with weight decay, but the job's is "
            f"{type(optimizer).__name__}; {ADVICE}."
        )


def _refuse_other_parameters(found: Mapping[str, _Parameter], own: Names, expected: ExpectedState) -> Iterator[str]:
    """Refuse parameters that only one side trains; a frozen parameter without state is the same on both."""
    wanted = {name for group in own for name in group}
    for name, one in found.items():
        if name not in expected.names:
            raise WrongCheckpoint(f"The source's optimizer has {name}, which the job's does not; {ADVICE}.")
        if name not in wanted and one.slots:
            raise WrongCheckpoint(f"The source's optimizer trains {name}, which the job freezes; {ADVICE}.")
    if missing := sorted(wanted - found.keys()):
        raise WrongCheckpoint(f"The job trains {missing[0]}, which the source's optimizer does not have; {ADVICE}.")
    fresh = [name for name in sorted(wanted) if not found[name].slots]
    if fresh and len(fresh) < len(wanted):
        yield f"optimizer: no state at the source for {', '.join(fresh)}, which had no gradient"


def _step(asked: int | None, training: TrainingState, slots: Mapping[str, Slots]) -> tuple[int, list[str]]:
    counts = [int(_number(one["step"])) for one in slots.values() if "step" in one]
    counted = max(counts, default=None)
    if asked is not None:
        return asked, []
    if training.step is None and counted is None:
        return 0, ["step: the source does not say how many steps it took; 0 is assumed (--step N)"]
    if training.step is None:
        assert counted is not None
        return counted, []
    told = f"step: {training.step}, as the source says; its optimizer counts {counted}"
    return training.step, [told] if counted not in (None, training.step) else []


def _number(value: Any) -> float:
    if isinstance(value, HeldParts):
        return float(value.parts[0].tensor) if value.parts else 0.0
    return float(value)


def _groups(
    found: Mapping[str, _Parameter], own: Names, values: list[dict[str, Any]], rates: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The hyperparameters of the job's groups: the source's, where it has them."""
    groups, notes = [], []
    for number, (names, mine) in enumerate(zip(own, values, strict=True)):
        theirs = _common(number, names, found) if names else mine
        taken = {k: v for k, v in theirs.items() if (k in mine and k not in IMPLEMENTATION) or k == "initial_lr"}
        groups.append(mine | taken | (rates[number] if rates else {}))
        moved = RATES if rates or "initial_lr" in theirs else frozenset()
        notes += [
            f"optimizer: {k} of group {number} is {v!r}, as at the source; the job has {mine[k]!r}"
            for k, v in taken.items()
            if k in mine and k not in moved and not _same(v, mine[k])
        ]
        if unknown := sorted(theirs.keys() - mine.keys() - IMPLEMENTATION - RATES):
            notes.append(f"optimizer: settings left out, which the job's has not: {', '.join(unknown)}")
    return groups, list(dict.fromkeys(notes))


def _common(number: int, names: list[str], found: Mapping[str, _Parameter]) -> Mapping[str, Any]:
    """The settings that the source has for all parameters of one of the job's groups."""
    first = found[names[0]].values
    for name in names:
        own = found[name].values
        if differs := next((k for k in first if k not in IMPLEMENTATION and not _same(own.get(k), first[k])), None):
            raise WrongCheckpoint(
                f"Group {number} of the job's optimizer has {names[0]} and {name}, for which the source has {differs} "
                f"{first[differs]!r} and {own.get(differs)!r}; give the job the source's groups, or {ADVICE}."
            )
    return first


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other)


def _stored(name: str, slots: Slots) -> Iterator[tuple[str, HeldParts]]:
    """State as a checkpoint stores it: plain numbers get a suffix."""
    for key, value in slots.items():
        if isinstance(value, HeldParts):
            yield key, value
        elif torch.is_tensor(value):
            yield key, held_parts(value)
        elif isinstance(value, bool | int | float):
            yield f"{key}:{type(value).__name__}", held_parts(torch.tensor(value, dtype=NUMBERS[type(value).__name__]))
        elif value is not None:
            raise WrongCheckpoint(
                f"The source's optimizer has {key} of {name} as a {type(value).__name__}, not a tensor; {ADVICE}."
            )


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
