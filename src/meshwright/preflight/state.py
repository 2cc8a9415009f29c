"""State besides parameters: what forward changes, what checkpoints miss, BatchNorm, and modules in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from meshwright.facts.finding import Level
from meshwright.facts.model import MovedFacts
from meshwright.preflight.subject import Case, Issue, Subject, always, first_and_more
from meshwright.strategies.moved_state import refuse_moved


def moved(subject: Subject) -> Iterator[Issue]:
    """State that forward changes."""
    for state in subject.facts.moved:
        by = "by the samples that it sees" if state.by_samples else "in every call"
        yield Issue(
            kind="state-changed-in-forward",
            what=f"Forward changes the {_noun(state)} {state.name} {by}; ranks and micro-batches would change it "
            "differently than one process.",
            level=lambda case, state=state: _moved_level(case, state),  # type: ignore[misc]
            do="Let a BatchNorm or the optimizer change it, or train with single.",
            module=state.name,
            place=subject.changed(state.name),
        )


def _moved_level(case: Case, state: MovedFacts) -> Level | None:
    alone = replace(case.subject.facts, moved=(state,))
    return "refused" if refuse_moved(case.strategy, alone, case.steps) else None


def _noun(state: MovedFacts) -> str:
    return "parameter" if state.parameter else "buffer" if state.saved else "state"


def unsaved(subject: Subject) -> Iterator[Issue]:
    """State that forward changes and checkpoints do not hold."""
    for state in subject.facts.moved:
        if not state.saved:
            yield Issue(
                kind="unsaved-state",
                what=f"Forward changes {state.name}, which is not in the model's state dict: a run that continues from "
                "a checkpoint starts it anew.",
                level=always,
                do="Register it as a persistent buffer.",
                module=state.name,
                place=subject.changed(state.name),
            )


def grown(subject: Subject) -> Iterator[Issue]:
    """Lists and dicts to which every pass adds."""
    for name in subject.trial.grown:
        yield Issue(
            kind="growing-state",
            what=f"Every forward pass adds to {name}, and nothing empties it: memory grows from step to step, and a "
            "tensor that is kept with its graph keeps all activations.",
            level=always,
            do="Return what is to be logged, or keep the last value only, detached.",
            module=name,
            place=subject.changed(name),
        )


def batch_norm(subject: Subject) -> Iterator[Issue]:
    names = list(subject.facts.batch_norms)
    if names:
        yield Issue(
            kind="batch-norm",
            what=f"BatchNorm ({first_and_more(names)}) normalises over one micro-batch of all data ranks, not over the "
            "global batch.",
            level=_batch_norm_level,
            do="Leave out mb, or use GroupNorm or LayerNorm.",
            module=names[0],
            place=partial(subject.made, names[0]),
        )


def _batch_norm_level(case: Case) -> Level | None:
    if case.steps == 1:
        return None
    return "refused" if case.strategy.stage_axis else "warning"


def frozen_batch_norm(subject: Subject) -> Iterator[Issue]:
    """BatchNorms whose parameters are frozen and whose statistics still move."""
    trainable = {name for parameter in subject.facts.trainable for name in parameter.names}
    frozen = {name for p in subject.facts.parameters if not p.trainable for name in p.names}
    names = [
        name
        for name in subject.facts.batch_norms
        if f"{name}.weight" in frozen and f"{name}.weight" not in trainable and f"{name}.bias" not in trainable
    ]
    if names:
        yield Issue(
            kind="frozen-batch-norm",
            what=f"The parameters of BatchNorm {first_and_more(names)} are frozen, but every step still updates its "
            "running statistics and normalises by the batch.",
            level=always,
            do="Replace it by a module with fixed statistics, or train its parameters, too.",
            module=names[0],
            place=subject.made(names[0]),
        )


def evaluated(subject: Subject) -> Iterator[Issue]:
    names = list(subject.facts.evaluated)
    if names:
        yield Issue(
            kind="eval-mode",
            what=f"The builder puts {first_and_more(names)} into eval mode, but every training step starts with "
            "model.train(), which undoes it.",
            level=always,
            do="Override train() in the module so that it stays in eval mode, or remove its dropout and BatchNorm.",
            module=names[0],
            place=subject.made(names[0]),
        )
