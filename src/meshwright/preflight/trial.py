"""A pass of a small model on real tensors: what it does to its batch, which values steer it, dropout in eval mode."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from meshwright.describe.code_lines import CodeLine, failed_line, is_authors, running_line, running_module
from meshwright.describe.draws import DrawWatcher
from meshwright.describe.observe import SAMPLES, call_loss, call_model, make_batch
from meshwright.describe.samples import own_random_numbers
from meshwright.describe.structure import tensors_of
from meshwright.facts.job import Job
from meshwright.facts.model import DrawFacts
from meshwright.preflight.places import CodePlace
from meshwright.recording.operation import changed_by
from meshwright.torch_private.modules import REGISTERED
from meshwright.torch_private.tensors import storage_id

_TORCH = Path(torch.__file__).parent
_AROUND = (str(Path(__file__).parents[1]), str(_TORCH / "_compile.py"), str(_TORCH / "_dynamo"))
"""Files of functions that run between an operator's caller and a mode that sees the operator."""
SMALL = 1 << 23
"""The largest model, in parameters, that is built and run for this."""
PASSES = 8
"""Passes with other random numbers, until a parameter counts as unused in a model that skips layers at random."""


@dataclass(frozen=True)
class Event:
    """Something that a line of the author's code does."""

    module: str | None
    """None: the loss does it."""
    place: CodePlace
    name: str = ""
    """The parameter that is changed."""
    kind: type = object
    """Of the number that is read."""


@dataclass(frozen=True)
class Trial:
    """What was seen in a pass in training mode, and in one in eval mode."""

    written: tuple[Event, ...] = ()
    """Lines that change the batch in place."""
    moved: tuple[Event, ...] = ()
    """Lines that change trainable parameters in place."""
    reads: tuple[Event, ...] = ()
    """Lines that read a number that depends on parameters."""
    generators: tuple[str, ...] = ()
    """Attributes that hold generators of Python or numpy, from which the pass drew."""
    grown: tuple[str, ...] = ()
    """Lists and dicts that are longer after each pass."""
    dropped: tuple[DrawFacts, ...] = ()
    """Dropout in eval mode."""
    device: tuple[str, CodePlace] | None = None
    """The error of a pass on the CPU that asked for a GPU, and its line."""


def make_trial(job: Job, parameters: int) -> Trial:
    """Run the passes; empty if the model is large or does not run."""
    if parameters > SMALL:
        return Trial()
    try:
        with own_random_numbers(0):
            return _passes(job, job.model())
    except Exception as error:  # why a job does not run is said elsewhere, except that it does on a GPU alone
        line = failed_line(error)
        is_device = "cuda" in str(error).lower()
        return Trial(device=(str(error).splitlines()[0], _place(line))) if is_device and line else Trial()


def _passes(job: Job, model: nn.Module) -> Trial:
    batch = make_batch(job, SAMPLES)
    watcher = _Watcher(model, batch)
    before = dict(_generators(model))
    with watcher.watching(model.train(), dict(model.named_parameters())):
        output = call_model(job, model, batch)
        watcher.in_loss = True
        call_loss(job, output, batch)
    sizes = dict(_sizes(model))
    call_model(job, model, batch)
    drawn = [name for name, state in _generators(model) if state != before.get(name, state)]
    return Trial(
        written=tuple(watcher.written.values()),
        moved=tuple(watcher.moved.values()),
        reads=tuple(watcher.reads.values()),
        generators=tuple(drawn),
        grown=tuple(name for name, size in _sizes(model) if size > sizes.get(name, size)),
        dropped=_dropped_in_eval(job, model),
    )


def _dropped_in_eval(job: Job, model: nn.Module) -> tuple[DrawFacts, ...]:
    watcher = DrawWatcher((), model)
    with torch.no_grad(), watcher.watching(model.eval(), {}):
        call_model(job, model, make_batch(job, SAMPLES))
    return tuple(draw for draw in watcher.draws if draw.dropout)


class _Watcher(DrawWatcher):
    """Also notes who writes to the batch, and who reads numbers that depend on parameters."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__((), model)
        self._given = {storage_id(tensor.untyped_storage()) for tensor in tensors_of(batch)}
        named = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
        self._trained = {storage_id(tensor.untyped_storage()): name for name, tensor in named}
        self.written: dict[CodeLine, Event] = {}
        self.moved: dict[CodeLine, Event] = {}
        self.reads: dict[CodeLine, Event] = {}
        self.seen = self._see

    def _see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        for tensor in changed_by(func, args, {}):
            storage = storage_id(tensor.untyped_storage())
            if storage in self._given:
                self._add(self.written)
            if storage in self._trained:
                self._add(self.moved, name=self._trained[storage])
        depends = isinstance(result, float | bool) and any(self.sources(tensor) for tensor in tensors_of(args))
        if depends and is_authors(_caller()):  # integers count something, and what libraries read does not steer
            self._add(self.reads, kind=type(result))

    def _add(self, events: dict[CodeLine, Event], *, name: str = "", kind: type = object) -> None:
        line, running = running_line(), running_module()
        if line is not None:
            module = None if self.in_loss or running is None else self._modules.get(id(running), "")
            events.setdefault(line, Event(module=module, place=_place(line), name=name, kind=kind))


def _caller() -> str:
    """The file of the function that called the running operator."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_AROUND):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def _generators(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Generators that modules keep, and their states."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            place = f"{name}.{attribute}" if name else attribute
            if isinstance(value, random.Random):
                yield place, str(value.getstate())
            elif isinstance(value, numpy.random.Generator):
                yield place, str(value.bit_generator.state)
            elif isinstance(value, numpy.random.RandomState):
                yield place, str(value.get_state(legacy=False))


def _sizes(model: nn.Module) -> Iterator[tuple[str, int]]:
    """The lengths of the lists and dicts that modules keep besides their tensors and children."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in REGISTERED and isinstance(value, list | dict):
                yield f"{name}.{attribute}" if name else attribute, len(value)


def ever_used(job: Job) -> set[str]:
    """Parameters that get a gradient in one of several passes with other random numbers."""
    model, used = job.model().train(), set[str]()
    for seed in range(PASSES):
        with own_random_numbers(seed):
            batch = make_batch(job, SAMPLES)
            total, _ = call_loss(job, call_model(job, model, batch), batch)
            total.backward()
        used |= {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return used


def _place(line: CodeLine | None) -> CodePlace:
    return CodePlace(line.file, line.line) if line else CodePlace()
