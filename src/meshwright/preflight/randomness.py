"""Random numbers: dropout, whose masks differ under some strategies, and the model's and loss's own randomness."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from meshwright.facts.finding import Level
from meshwright.facts.model import DrawFacts
from meshwright.facts.strategy import Strategy
from meshwright.preflight.places import CodePlace
from meshwright.preflight.subject import Case, Issue, Subject, always


def own_draws(subject: Subject) -> Iterator[Issue]:
    """Random numbers besides dropout, one issue for each line."""
    lines: dict[tuple[str, int], DrawFacts] = {}
    for draw in subject.facts.draws:
        if not draw.dropout:
            lines.setdefault((draw.file, draw.line), draw)
    for draw in lines.values():
        owner = "The loss" if draw.module is None else f"Module {draw.module or type(subject.model).__name__}"
        generator = "" if _is_torch(draw) else " Its generator is not PyTorch's, so ranks of one model may draw apart."
        yield Issue(
            kind="own-randomness",
            what=f"{owner} draws random numbers by {draw.operator}: ranks and micro-batches draw other numbers than "
            f"one process, and verify reports the difference.{generator}",
            level=_level,
            do="Nothing if equal in distribution is enough; else draw in the data, or switch it off to verify.",
            module=draw.module or "",
            place=CodePlace(draw.file, draw.line),
        )


def kept_generators(subject: Subject) -> Iterator[Issue]:
    """Generators of Python or numpy that modules keep and draw from."""
    for name in subject.trial.generators:
        yield Issue(
            kind="own-randomness",
            what=f"Forward draws random numbers from {name}, a generator that the module keeps: ranks and "
            "micro-batches draw other numbers than one process, its state is in no checkpoint, and ranks of one model "
            "may draw apart.",
            level=_level,
            do="Draw from PyTorch's generator, or in the data.",
            module=name.rpartition(".")[0],
            place=partial(subject.made, name),
        )


def dropout_in_eval(subject: Subject) -> Iterator[Issue]:
    """Dropout that eval mode does not switch off."""
    for draw in subject.trial.dropped:
        yield Issue(
            kind="dropout-in-eval",
            what=f"Module {draw.module or type(subject.model).__name__} drops values in eval mode, too, so validation "
            "and inference are random: the functions of torch.nn.functional drop unless they are told not to.",
            level=always,
            do="Use nn.Dropout, or pass training=self.training (for attention, dropout_p=0.0 unless self.training).",
            module=draw.module or "",
            place=CodePlace(draw.file, draw.line),
        )


def _is_torch(draw: DrawFacts) -> bool:
    return not draw.operator.endswith("random")


def _level(case: Case) -> Level | None:
    return "warning" if case.is_divided or case.strategy.compile else None


def other_masks(strategy: Strategy) -> str:
    """Why a strategy draws other dropout masks than one process; empty if it draws the same."""
    if strategy.compile:
        return "compiled code draws its own"
    if strategy.model_ranks > 1:
        return "it divides the model, and each part draws for itself"
    if strategy.data_ranks > 1 or strategy.micro_batch is not None:
        return "each micro-batch draws for itself; strategies that cut the batch alike draw the same"
    return ""


def dropout(subject: Subject, strategy: Strategy) -> Iterator[Issue]:
    """Dropout under a named strategy. It is too common to mention without one."""
    found = next((draw for draw in subject.facts.draws if draw.dropout), None)
    if found is not None and (why := other_masks(strategy)):
        yield Issue(
            kind="dropout",
            what=f"{strategy} draws other random numbers (dropout) than one process would: {why}. They are equal in "
            "distribution, not in bits.",
            level=lambda case: "note",
            do="Nothing has to be done; docs/same-training.md explains it.",
            module=found.module or "",
            place=CodePlace(found.file, found.line),
        )
