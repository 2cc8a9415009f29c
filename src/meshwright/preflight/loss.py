"""Losses that are no sum over samples with the weight of that sum, and models that mix samples."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.assemble.check import refuse_whole_batch
from meshwright.errors import Refused
from meshwright.facts.finding import Level
from meshwright.facts.model import LOSS_FORMS
from meshwright.preflight.places import CodePlace, place_of_function, place_of_module
from meshwright.preflight.subject import Case, Issue, Subject

RETURN = "Return the sum over what is counted, and that count as the weight."
SURELY_WRONG = ("divided_twice", "constant_weight", "mean_without_padding", "padding_counted", "other_count")
"""Forms that change the gradient's size under every strategy."""


def weight(subject: Subject) -> Iterator[Issue]:
    """A loss whose weight does not belong to its sum."""
    form = subject.facts.loss_form
    if form:
        yield Issue(
            kind="loss-weight",
            what=f"The loss is {LOSS_FORMS[form]}.",
            level=_weight_level,
            do=RETURN,
            place=subject.loss,
        )


def _weight_level(case: Case) -> Level | None:
    level = _whole_batch_level(case) if case.subject.facts.loss_over == "batch" else None
    return "warning" if level != "refused" and case.subject.facts.loss_form in SURELY_WRONG else level


def whole_batch(subject: Subject) -> Iterator[Issue]:
    """A loss that compares samples with each other."""
    if subject.facts.loss_over == "batch" and not subject.facts.loss_form:  # else that is the cause
        yield Issue(
            kind="loss-over-batch",
            what="The loss of a batch is not the sum of the losses of its parts (contrastive losses, batch "
            "statistics), so the outputs of all ranks and micro-batches are gathered for it.",
            level=_whole_batch_level,
            do='Nothing with a data strategy; or Job(loss_over="samples") if each part should be a batch of its own.',
            place=subject.loss,
        )


def _whole_batch_level(case: Case) -> Level | None:
    if case.parts == 1:
        return None
    return "refused" if _refused(case) else "note"


def mixed_samples(subject: Subject) -> Iterator[Issue]:
    """A model whose outputs or gradients for a sample depend on the other samples of the batch."""
    facts = subject.facts
    if facts.loss_over == "model":
        where = facts.mixing_module
        name = f"module {where or type(subject.model).__name__}, and so the model's {facts.mixed_output},"
        yield Issue(
            kind="samples-mixed",
            what=f"The output of {name} depends on which samples share a batch.",
            level=lambda case: "refused" if _refused(case) else None,
            do="Return one result per sample and compute what is over the batch in Job(loss=...); or "
            'Job(loss_over="samples") if each part should be a batch of its own.',
            module=where or "",
            place=_forward(subject, where or ""),
        )
    if facts.loss_over == "backward":
        yield Issue(
            kind="gradients-mixed",
            what=f"The gradient of {facts.mixed_output} depends on which samples share a batch.",
            level=lambda case: "refused" if _refused(case) else None,
            do="Drop the hook or function that clips or scales it.",
            module=facts.mixed_output,
            place=subject.made(facts.mixed_output),
        )


def _forward(subject: Subject, module: str) -> CodePlace:
    place = place_of_module(subject.model, module)
    return place if place.line else place_of_function(subject.job.model)


def _refused(case: Case) -> bool:
    try:
        return refuse_whole_batch(case.subject.job, case.subject.facts, case.strategy) is not None
    except Refused:
        return True
