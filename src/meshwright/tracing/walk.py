"""Follow a traced step module by module: which kernels, messages and allocations happen where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError, Refused, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.facts.trace import Message, Operation
from meshwright.facts.walk import LOSS, OPTIMIZER, PASSES, Visit, Walk
from meshwright.torch_private.trees import tree_leaves
from meshwright.tracing.memory import MemoryEvent
from meshwright.tracing.record_step import StepObserver, record_step
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.step import refuse_trace

KEPT = ("activations", "logits")
"""Causes of what backward needs."""


def walk_roles(job: Job, facts: ModelFacts, strategy: Strategy, ranks: int) -> list[Walk]:
    """A walk for each place of a pipeline, or for rank 0 if all ranks do the same."""
    if strategy.traits.many_devices:
        from meshwright.tracing.walk_devices import walk_devices  # which stands on this file

        return [walk_devices(job, facts, strategy, ranks)]
    places = strategy.resolve(ranks).stage_ranks
    return [walk_step(job, facts, strategy, ranks=ranks, rank=place * ranks // places) for place in range(places)]


def walk_step(job: Job, facts: ModelFacts, strategy: Strategy, *, ranks: int, rank: int = 0) -> Walk:
    """What `rank` of `ranks` does in one optimizer step, from a trace of the whole model."""
    resolved = refuse_trace(job, facts, strategy, ranks, "cuda")
    follower = Follower(facts)
    try:
        recorded = record_step(job, facts, resolved, ranks, rank, observer=follower)
    except MeshwrightError:
        raise
    except Exception as error:
        raise Refused(f"A step under {resolved} cannot be traced on fake tensors: {one_line(error)}") from error
    return Walk(rank=rank, ranks=ranks, visits=follower.visits(), stages=recorded.stages)


@dataclass
class _Open:
    """A visit that is being recorded."""

    phase: str
    module: str
    micro_batch: int
    since: int
    """Number of memory events before it."""
    operations: Counter[Operation] = field(default_factory=Counter)
    messages: list[Message] = field(default_factory=list)


class Follower(StepObserver):
    """Notes the module in which everything of a step happens.

    A module's forward begins when it is called. Its backward begins when the gradient of its output arrives, and ends
    when that of another module does.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._calls = Counter(call.name for call in facts.calls) or Counter(facts.blocks)
        self._recorder: StepRecorder
        self._inside: tuple[str, str] = ("", "")
        """The phase and name of the module that was entered last; no name between modules."""
        self._entered: Counter[tuple[str, str]] = Counter()
        self._open: list[_Open] = []
        self._events: list[MemoryEvent] = []
        self._is_on = False

    def attach(self, models: Iterable[nn.Module], recorder: StepRecorder) -> None:
        self._recorder = recorder
        recorder.operations.told, recorder.messages.told = self._operation, self._message
        for model in models:
            modules = dict(model.named_modules())
            for name in self._calls:
                module = modules.get(name)
                if module is not None and any(True for _ in module.parameters()):
                    # Before the hooks of data strategies, which gather a module's parameters.
                    module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
                    module.register_forward_hook(partial(self._watch_output, name), prepend=True)
                    module.register_forward_hook(self._leave)  # after those that free them

    def begin(self) -> None:
        self._entered.clear()
        self._inside = "forward", ""
        self._open, self._is_on = [], True
        self._first = len(self._recorder.ledger.events)
        self._begin_visit()

    def end(self) -> None:
        self._is_on = False
        self._events = self._recorder.ledger.events

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        phase = self._recorder.step_phase
        if phase == "forward":
            self._entered[phase, name] += 1
        self._inside = phase, name
        self._begin_visit()

    def _watch_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Notice when the gradient of a module's output arrives. What is recomputed belongs to its backward."""
        if self._recorder.step_phase == "forward":
            leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
            for leaf in islice(leaves, 1):
                leaf.register_hook(partial(self._enter_backward, name))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recorder.step_phase == "forward":
            self._inside = "forward", ""
            self._begin_visit()

    def _enter_backward(self, name: str, gradient: torch.Tensor) -> None:
        self._entered["backward", name] += 1
        self._inside = "backward", name
        self._begin_visit()

    def _place(self) -> tuple[str, str]:
        """The current phase and module."""
        phase = self._recorder.step_phase
        if phase == "update":
            return phase, OPTIMIZER
        if self._recorder.in_loss:
            return phase, LOSS
        inside, name = self._inside
        if inside == phase:
            return phase, name
        return phase, LOSS if phase == "backward" else PASSES

    def _begin_visit(self) -> None:
        if self._is_on:
            phase, module = self._place()
            if module == LOSS:
                self._entered[phase, module] += 1
            self._open.append(_Open(phase, module, self._micro_batch(phase, module), self._count()))

    def _micro_batch(self, phase: str, module: str) -> int:
        times = self._entered.get((phase, module), 0)
        if times:
            return (times - 1) // max(1, self._calls[module])
        before = next((one for one in reversed(self._open) if one.phase == phase), None)
        return before.micro_batch if before else 0

    def _count(self) -> int:
        return len(self._recorder.ledger.events)

    def _current(self) -> _Open:
        if (self._open[-1].phase, self._open[-1].module) != self._place():
            self._begin_visit()
        return self._open[-1]

    def _operation(self, operation: Operation) -> None:
        if self._is_on:
            self._current().operations[operation] += 1

    def _message(self, message: Message) -> None:
        if self._is_on:
            messages = self._current().messages
            if messages and replace(messages[-1], count=1) == message:
                messages[-1] = replace(message, count=messages[-1].count + 1)
            else:
                messages.append(message)

    def visits(self) -> tuple[Visit, ...]:
        """What was recorded, without visits in which nothing happened."""
        held: Counter[str] = Counter()
        for event in self._events[: self._first]:
            _apply(held, event)
        ends = [one.since for one in self._open[1:]] + [len(self._events)]
        found = [_closed(one, self._events[one.since : end], held) for one, end in zip(self._open, ends, strict=True)]
        return tuple(visit for visit in found if visit.operations or visit.messages or visit.gathered or visit.freed)


def _apply(held: Counter[str], event: MemoryEvent) -> None:
    held[event.block.cause] += event.block.bytes if event.is_allocation else -event.block.bytes


def _closed(one: _Open, events: list[MemoryEvent], held: Counter[str]) -> Visit:
    """The visit, with `held` advanced over its memory events."""
    before = sum(held[cause] for cause in KEPT)
    peak, most = Counter(held), held.total()
    gathered = freed = 0
    for event in events:
        _apply(held, event)
        if event.block.cause == "gathered":
            gathered += event.block.bytes if event.is_allocation else 0
            freed += 0 if event.is_allocation else event.block.bytes
        if held.total() > most:
            peak, most = Counter(held), held.total()
    return Visit(
        phase=one.phase,
        module=one.module,
        micro_batch=one.micro_batch,
        operations=tuple(replace(operation, count=count) for operation, count in one.operations.items()),
        messages=tuple(one.messages),
        gathered=gathered,
        freed=freed,
        kept=sum(held[cause] for cause in KEPT) - before,
        held={cause: size for cause, size in peak.items() if size},
    )
