"""Collectives in the author's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.facts.finding import Level
from meshwright.facts.model import CollectiveFacts
from meshwright.preflight.places import CodePlace
from meshwright.preflight.subject import Case, Issue, Subject


def collectives(subject: Subject) -> Iterator[Issue]:
    if subject.facts.collectives:
        yield from collective_issues(subject.facts.collectives, type(subject.model).__name__)


def collective_issues(found: Iterable[CollectiveFacts], model: str) -> Iterator[Issue]:
    for call in found:
        owner = "The loss" if call.module is None else f"Module {call.module or model}"
        yield Issue(
            kind="collective-in-model",
            what=f"{owner} calls torch.distributed's {call.name}, which under a strategy would communicate with ranks "
            "that hold other samples, other stages or other parts of the model.",
            level=_level,
            do="Remove it: a loss over the whole batch gets the outputs of all ranks, and BatchNorm is synchronised.",
            module=call.module or "",
            place=CodePlace(call.file, call.line),
        )


def _level(case: Case) -> Level | None:
    return "warning" if case.strategy.data_ranks * case.strategy.model_ranks > 1 else None
