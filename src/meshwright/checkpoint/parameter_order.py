"""Which of a job's parameters the numbers in a foreign optimizer stand for: torch numbers them in group order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from meshwright.checkpoint.foreign.training import Slots, TrainingState
from meshwright.checkpoint.name_matching import ExpectedState
from meshwright.errors import WrongCheckpoint
from meshwright.facts.job import NamedParameters

Names = list[list[str]]
"""Parameters by group."""


def groups_of(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> Names:
    names = {id(parameter): name for name, parameter in parameters.named()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def names_by_order(training: TrainingState, expected: ExpectedState, own: Names, advice: str) -> Names:
    """The first order of the job's parameters that has the source's group sizes and shapes.

    Tried in turn: the job's groups; the same groups with frozen parameters among them, as `AdamW(model.parameters())`
    has them; and for a single group the model's own order, with and without frozen parameters.
    """
    shapes = {name: tuple(p.shape) for name, p in expected.model.named_parameters()}
    sizes = [len(group) for group in training.numbered]
    misfit = ""
    for names in _orders(expected, own, single=len(sizes) == 1):
        if [len(group) for group in names] != sizes:
            continue
        found = _misfit(training.numbered, names, shapes)
        if found is None:
            return names
        misfit = misfit or found
    if misfit:
        raise WrongCheckpoint(f"The source's optimizer has {misfit}, so their orders differ; {advice}.")
    raise WrongCheckpoint(
        f"The source's optimizer has {_counts(sizes)}, the job's {_counts([len(group) for group in own])}; give the "
        f"job the source's groups, or {advice}."
    )


def _orders(expected: ExpectedState, own: Names, *, single: bool) -> Iterator[Names]:
    yield own
    everything = NamedParameters(expected.model.named_parameters())
    yield groups_of(expected.job.optimizer(everything), everything)
    if single:
        yield [[name for name, p in everything.named() if p.requires_grad]]
        yield [[name for name, _ in everything.named()]]


def _misfit(numbered: list[list[Slots]], names: Names, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """The first state whose shape is not its parameter's; factored state has other shapes."""
    for slots, own in zip(numbered, names, strict=True):
        for state, name in zip(slots, own, strict=True):
            for key, value in state.items():
                if not _fits(key, value, shapes[name]):
                    return f"{key} of shape {tuple(value.shape)} where the job has {name} of shape {shapes[name]}"
    return None


def _fits(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    is_whole = torch.is_tensor(value) and value.numel() > 1 and "row" not in key and "col" not in key
    return not is_whole or tuple(value.shape) == shape


def _counts(sizes: list[int]) -> str:
    if len(sizes) == 1:
        return f"{sizes[0]} parameters"
    return f"{len(sizes)} parameter groups of {', '.join(map(str, sizes))} parameters"
