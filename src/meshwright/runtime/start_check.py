"""Check, before the first step, that a run starts from the values that the job's builder gives in plain PyTorch.

Note on why: models are filled from a recording of their builder, and a mistake in it would silently train another
model. For a small model, rank 0 therefore runs the builder once more without recording. It compares every parameter,
buffer, plain tensor attribute and one output with a model filled from the recording, then with what the strategy laid
out. Large models rely on the recording's checks, which need no second build.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from meshwright.assemble.step import Trainer
from meshwright.describe.observe import SAMPLES, call_model, make_batch
from meshwright.describe.structure import map_tensors, tensors_of
from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job
from meshwright.recording.blueprint import build_plainly, record, seeded
from meshwright.recording.constants import sample
from meshwright.recording.loose_tensors import loose_tensors
from meshwright.recording.memory import has_memory, named_tensors

SMALL = 1 << 26
"""The builder is run again up to this many parameters."""
CALLED = 1 << 22
"""The model is called as well up to this many parameters: on a CPU, more would take longer than a step."""


def check_start(trainer: Trainer) -> None:
    """Refuse to start from values that differ from the builder's. All ranks must call it."""
    world, count = trainer.world, sum(parameter.count for parameter in trainer.facts.parameters)
    if world.fake or world.weightless or count > SMALL:
        return
    comparison = _Comparison(trainer.job, trainer.seed) if world.is_main else None
    if not world.gather(comparison is not None and comparison.possible)[0]:
        return
    found = comparison.of_recording(call=count <= CALLED) if comparison else ""
    for name, tensor in trainer.engine.state():
        if comparison is not None and not found:
            found = comparison.of_tensor(name, tensor.detach().cpu())
    if reason := world.gather(found)[0]:
        raise JobError(reason)


class _Comparison:
    """A plain build, with which other models are compared."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._seed = job, seed
        try:
            self._model = build_plainly(job.model, seed)
            self._values = dict(_everything(self._model))
        except Exception:  # a real build may need more memory, or another machine
            self._values = {}

    @property
    def possible(self) -> bool:
        return bool(self._values)

    def of_recording(self, *, call: bool) -> str:
        """How a model filled from the recording differs; empty if it does not."""
        blueprint = record(self._job.model, self._seed)
        blueprint.fill(torch.device("cpu"))
        for name, tensor in _everything(blueprint.model):
            if difference := self.of_tensor(name, tensor):
                return difference
        return self._of_call(blueprint.model) if call else ""

    def of_tensor(self, name: str, tensor: torch.Tensor) -> str:
        plain = self._values.get(name)
        if plain is None or _is_same(tensor, plain) or not self._is_certain(name, plain):
            return ""
        return _differs(f"{name} would start from {_show(tensor)}", _show(plain), self._seed)

    def _is_certain(self, name: str, plain: torch.Tensor) -> bool:
        """Whether the builder gives the same value again: it may draw unseeded random numbers."""
        again = dict(_everything(build_plainly(self._job.model, self._seed))).get(name)
        return again is not None and _is_same(again, plain)

    def _of_call(self, filled: nn.Module) -> str:
        try:
            expected = self._call(self._model)
        except Exception:  # for instance, it needs a GPU
            return ""
        try:
            got = self._call(filled)
        except Exception as error:
            return _differs(f"the model's first call would raise {one_line(error)[:-1]}", "no error", self._seed)
        for index, (value, plain) in enumerate(zip(got, expected, strict=False)):
            if not _is_same(value, plain) and self._repeats(index, plain):
                return _differs(f"the model's first output would be {_show(value)}", _show(plain), self._seed)
        return ""

    def _repeats(self, index: int, plain: torch.Tensor) -> bool:
        """Whether another plain build gives the same output: a model may read a clock."""
        return _is_same(self._call(build_plainly(self._job.model, self._seed))[index], plain)

    @torch.no_grad()
    def _call(self, model: nn.Module) -> list[torch.Tensor]:
        with seeded(self._seed):
            batch = map_tensors(torch.Tensor.cpu, make_batch(self._job, SAMPLES))
            return list(tensors_of(call_model(self._job, model, batch)))


def _everything(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and tensors in plain attributes, by name."""
    loose = ((str(place), tensor) for place, tensor in loose_tensors(model))
    return ((name, tensor.detach()) for name, tensor in chain(named_tensors(model), loose) if has_memory(tensor))


def _is_same(value: torch.Tensor, plain: torch.Tensor) -> bool:
    """Whether values agree up to rounding: precision and the order of sums may differ."""
    if value.shape != plain.shape:
        return False
    if not plain.is_floating_point():
        return torch.equal(value.to(plain.dtype), plain)
    plain = plain.to(value.dtype)
    return torch.equal(value, plain) or torch.allclose(value, plain, rtol=1e-4, atol=1e-6, equal_nan=True)


def _show(tensor: torch.Tensor) -> str:
    first: Any = sample(tensor.flatten()[:3])
    return f"{first} (shape {tuple(tensor.shape)})"


def _differs(found: str, plain: str, seed: int) -> str:
    return (
        f"Refused to train: {found}, but torch.manual_seed({seed}) and the job's builder alone give {plain}. "
        "The recording of the builder is wrong; please report it, and keep tensors in parameters and buffers meanwhile."
    )
