"""Parameters that strategies treat in a special way: unused, tied, frozen, and those that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from meshwright.describe.optimizer import left_out
from meshwright.facts.finding import Level
from meshwright.preflight.places import CodePlace, place_of_function
from meshwright.preflight.subject import Case, Issue, Subject, always, first_and_more, listed
from meshwright.preflight.trial import SMALL, ever_used
from meshwright.preflight.unregistered import unregistered_tensors
from meshwright.torch_private.autograd import has_accumulation_hooks


def unused(subject: Subject) -> Iterator[Issue]:
    """Trainable parameters that the loss does not depend on, by the line that makes them."""
    groups: dict[CodePlace, list[str]] = {}
    for name in _surely_unused(subject):
        groups.setdefault(subject.made(name), []).append(name)
    for place, names in groups.items():
        yield Issue(
            kind="unused-parameter",
            what=f"The loss does not depend on {_listed(names)}, so training never changes "
            f"{'it' if len(names) == 1 else 'them'}.",
            level=always,
            do="Use them in forward, remove them, or set requires_grad=False.",
            module=names[0].rpartition(".")[0] or names[0],
            place=place,
        )


def _surely_unused(subject: Subject) -> list[str]:
    """Without those that only the observed step did not use, because it skipped layers at random."""
    names = list(subject.facts.unused)
    skips = subject.trial.generators or any(draw.operator.endswith("random") for draw in subject.facts.draws)
    if not names or not skips:
        return names
    if subject.size > SMALL:
        return []
    used = ever_used(subject.job)
    return [name for name in names if name not in used]


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else first_and_more(names)


def tied(subject: Subject) -> Iterator[Issue]:
    for parameter in subject.facts.parameters:
        if len(parameter.names) > 1:
            yield Issue(
                kind="tied-parameter",
                what=f"{listed(list(parameter.names))} are one parameter: every stage that reads it holds a copy, and "
                "their gradients are summed after each step.",
                level=lambda case: "note" if case.strategy.stage_axis else None,
                do="Nothing has to be done; untying them saves the copy and the sum.",
                module=parameter.names[-1].rpartition(".")[0] or parameter.name,
                place=partial(subject.made, parameter.names[-1]),
            )


def aliased(subject: Subject) -> Iterator[Issue]:
    for one, other in subject.facts.aliased:
        yield Issue(
            kind="shared-memory",
            what=f"{one} and {other} are two parameters in the same memory: one process updates that memory twice in "
            "a step, and ranks that hold copies or shards keep two different weights.",
            level=always,
            do=f"Assign the parameter itself ({other} = {one}), or copy its values.",
            module=other.rpartition(".")[0] or other,
            place=subject.made(other),
        )


def unregistered(subject: Subject) -> Iterator[Issue]:
    """Trainable tensors that modules keep where PyTorch does not look for parameters."""
    for owner, names in unregistered_tensors(subject.model).items():
        yield Issue(
            kind="unregistered-parameter",
            what=f"PyTorch does not register {_listed(names)}, because {owner} is a plain list, dict or tensor: "
            "nothing trains, saves, shards or moves what it holds to the device.",
            level=always,
            do="Keep layers in nn.ModuleList or nn.ModuleDict, and tensors in nn.Parameter or nn.ParameterList.",
            module=owner,
            place=partial(subject.made, owner),
        )


def not_updated(subject: Subject) -> Iterator[Issue]:
    """Trainable parameters that the job's optimizer does not get."""
    names = [name for name in left_out(subject.job, subject.model) if name not in subject.facts.unused]
    if names:
        yield Issue(
            kind="optimizer-skips",
            what=f"Job(optimizer=...) gives {_listed(names)} to no parameter group, so training never changes "
            f"{'it' if len(names) == 1 else 'them'}, although gradients are computed and summed over ranks.",
            level=always,
            do="Put them into a group, or set requires_grad=False.",
            module=names[0].rpartition(".")[0] or names[0],
            place=place_of_function(subject.job.optimizer),
        )


def half(subject: Subject) -> Iterator[Issue]:
    """Trainable parameters that the builder makes in float16."""
    parameters = subject.model.named_parameters()
    names = [name for name, one in parameters if one.requires_grad and one.dtype == torch.float16]
    if names:
        yield Issue(
            kind="float16-parameter",
            what=f"The builder makes {_listed(names)} in float16: small gradients and updates of such weights become "
            "zero, and large ones infinite.",
            level=always,
            do="Build the model in float32 and choose the precision in the strategy: bf16, or fp16 with a scaled loss.",
            module=names[0].rpartition(".")[0] or names[0],
            place=partial(subject.made, names[0]),
        )


def gradient_hooks(subject: Subject) -> Iterator[Issue]:
    """Hooks that run when a gradient has been accumulated, before micro-batches and ranks are summed."""
    names = [name for name, parameter in subject.model.named_parameters() if has_accumulation_hooks(parameter)]
    if names:
        yield Issue(
            kind="gradient-hook",
            what=f"A hook runs whenever the gradient of {first_and_more(names)} has been accumulated. With several "
            "micro-batches or ranks it sees a part of the gradient, and a shard of the parameter does not have it.",
            level=lambda case: "warning" if case.is_divided else None,
            do="Clip with the job's own option, or change gradients in the optimizer's step.",
            module=names[0].rpartition(".")[0] or names[0],
            place=partial(subject.made, names[0]),
        )


def frozen(subject: Subject) -> Iterator[Issue]:
    names = [p.name for p in subject.facts.parameters if not p.trainable]
    if names:
        yield Issue(
            kind="frozen-parameter",
            what=f"{first_and_more(names)} of {len(subject.facts.parameters)} parameters are frozen: they get no "
            "gradient and no optimizer state, but their shards are gathered in every pass, and their stage does less "
            "work in backward than its forward suggests.",
            level=_frozen_level,
            do="Nothing has to be done; in their own modules, Job(units=...) or Job(stages=...) can separate them.",
            module=names[0].rpartition(".")[0] or names[0],
            place=partial(subject.made, names[0]),
        )


def _frozen_level(case: Case) -> Level | None:
    return "note" if case.strategy.traits.gathers or case.strategy.stage_axis else None


def read_elsewhere(subject: Subject) -> Iterator[Issue]:
    """Parameters of shard units that are read while the unit does not run."""
    names = list(subject.facts.read_outside)
    if names:
        yield Issue(
            kind="parameter-read-elsewhere",
            what=f"{first_and_more(names)} is read outside of the forward of the module that holds it, so it stays "
            "gathered for the whole step.",
            level=lambda case: "note" if case.strategy.traits.gathers else None,
            do="Call the module instead of reading its parameter.",
            module=names[0].rpartition(".")[0] or names[0],
            place=partial(subject.made, names[0]),
        )
