"""Time the host's part of a model's pass, unit by unit: its Python and autograd, without any kernel.

The pass runs on meta tensors, which have shapes only. PyTorch computes most shapes in Python, which takes longer than
all else. So a first pass notes the results of every operator, and in timed passes a mode makes them from these notes.
What the mode takes for one operator is timed apart, and subtracted: on a device, a kernel is launched instead.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from meshwright.assemble.precision import apply_precision, loss_under
from meshwright.describe.as_on_cuda import composites_as_on_cuda
from meshwright.describe.dtypes import DTYPES
from meshwright.describe.observe import SAMPLES, call_model, make_batch
from meshwright.describe.structure import map_tensors
from meshwright.errors import JobError, one_line
from meshwright.facts.host_passes import HostPasses
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.recording.blueprint import record, set_attributes
from meshwright.recording.operation import Slot
from meshwright.recording.report_as_cpu import META, meta_of
from meshwright.recording.wrap_forward import replaced_forwards
from meshwright.torch_private.trees import tree_leaves
from meshwright.tracing.noted_results import NoteResults, RepeatResults
from meshwright.tracing.unit_recorder import LOSS

ROUNDS = 15
"""Timed passes."""
SAMPLE = 200
"""Operators in one timing of what the mode takes."""
Clock = Callable[[], float]
Times = list[list[float]]
"""Seconds of forward and backward of each unit."""


def time_host_passes(
    job: Job, facts: ModelFacts, precision: str = "fp32", clock: Clock = time.thread_time
) -> HostPasses:
    """Host seconds of each unit's forward and backward; `JobError` if the model does not run on meta tensors.

    They include what the engine does within a pass, which in 16 bits looks at every function. The clock is that of this
    thread, which other processes do not advance.
    """
    blueprint = record(job.model, seed=0, values=False)
    blocks = [blueprint.model.get_submodule(name) for name in facts.blocks]
    apply_precision(blueprint.model, blocks, DTYPES[precision], pure=False, left_to_cast=())
    model = blueprint.model.to(META)
    set_attributes(model, blueprint.attributes, _empty)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[precision])
    batch = map_tensors(meta_of, make_batch(job, SAMPLES))
    names = [*(call.name for call in facts.calls), LOSS]

    def step(watch: Stopwatch) -> None:
        with _watched(model, names[:-1], watch):
            output = call_model(job, model, batch)
            total, _ = loss_under(precision, job)(output, batch)
            _differentiate(model, total, watch)

    errors = []
    # New tensors are on the CPU unless the model says otherwise; a default device costs a little at every function.
    for default in (nullcontext, lambda: torch.device(META)):
        try:
            with default(), composites_as_on_cuda():
                rounds = _own_rounds(step, names, clock, facts.blocks)
            break
        except Exception as error:
            errors.append(error)
    else:
        raise JobError(f"The model's pass cannot be timed on meta tensors: {one_line(errors[-1])}") from errors[-1]
    reference, speed = _reference_rounds(clock), rounds.speed  # the same speed, because only the ratio counts
    units: dict[str, tuple[float, float]] = {}
    for name, times in zip(names, rounds.at(speed), strict=True):
        forward, backward = (max(0.0, seconds) for seconds in times)
        before = units.get(name, (0.0, 0.0))  # a module may be called several times
        units[name] = max(before[0], forward), max(before[1], backward)
    return HostPasses(units=units, reference=sum(reference.at(speed)[0]))


def time_reference(clock: Clock = time.thread_time) -> float:
    """Host seconds of forward and backward of a small fixed model: how fast this machine's host is."""
    rounds = _reference_rounds(clock)
    return sum(rounds.at(rounds.speed)[0])


def _reference_rounds(clock: Clock) -> _Rounds:
    with torch.device(META):
        blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(16)]
        model, x = nn.Sequential(*blocks), torch.empty(2, 16, 64)

    def step(watch: Stopwatch) -> None:
        watch.enter(0)
        _differentiate(model, model(x).sum(), watch)

    notes = NoteResults()
    _timed(step, 1, clock, notes)
    rounds = _Rounds()
    with _without_collector():
        for _ in range(ROUNDS):
            rounds.speeds.append(_time_overhead(clock).made)
            rounds.times.append(_timed(step, 1, clock, RepeatResults(notes.results)))
    return rounds


class Stopwatch:
    """Assigns time to the unit that is running, in forward and in backward."""

    def __init__(self, units: int, clock: Clock) -> None:
        self.times: Times = [[0.0, 0.0] for _ in range(units)]
        self._clock, self._at, self._backward, self._since = clock, 0, False, clock()

    def enter(self, unit: int) -> None:
        """Begin a unit's forward, and end that of the one before it."""
        self._lap()
        self._at = unit

    def return_to(self, unit: int) -> None:
        """Begin a unit's backward."""
        if self._backward and unit < self._at:
            self.enter(unit)

    def begin_backward(self) -> None:
        self._lap()
        self._backward = True

    def end(self) -> None:
        self._lap()

    def _lap(self) -> None:
        now = self._clock()
        self.times[self._at][self._backward] += now - self._since
        self._since = now


@dataclass(frozen=True)
class _Overhead:
    """Seconds that the mode takes for one operator that would run a kernel, and adds to one that would not."""

    made: float
    passed: float


@dataclass(frozen=True)
class _Rounds:
    """Several timings of the same, and what the mode took for one operator beside each.

    Other processes slow down all Python alike, and for longer than a round.
    """

    times: list[Times] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """What the mode takes on an undisturbed host: the lower quartile, because the shortest may be a lucky one."""
        return quantiles(self.speeds, n=4)[0]

    def at(self, speed: float) -> Times:
        """The median of the rounds, each as it would be if the mode took so long."""
        scales = [speed / own if own else 1.0 for own in self.speeds]
        scaled = [
            [[t * scale for t in unit] for unit in times] for times, scale in zip(self.times, scales, strict=True)
        ]
        return [[median(times) for times in zip(*unit, strict=True)] for unit in zip(*scaled, strict=True)]


def _own_rounds(step: Callable[[Stopwatch], None], names: list[str], clock: Clock, blocks: Collection[str]) -> _Rounds:
    """The times of the units, less what the mode takes for their operators."""
    notes, units = NoteResults(), len(names)
    _timed(step, units, clock, notes)

    def timed(clock_of: Callable[[RepeatResults], Clock]) -> Times:
        mode = RepeatResults(notes.results)
        return _timed(step, units, clock_of(mode), mode)

    made, passed = timed(lambda mode: lambda: float(mode.made)), timed(lambda mode: lambda: float(mode.passed))
    skipped = next((name for name, ran in zip(names, made, strict=True) if name in blocks and not any(ran)), None)
    if skipped is not None:  # a value decides, such as a number that was drawn to drop a layer
        raise JobError(f"{skipped} computes nothing there.")
    rounds = _Rounds()
    with _without_collector():
        for _ in range(ROUNDS):
            took = _time_overhead(clock)
            whole = timed(lambda mode: clock)
            rounds.speeds.append(took.made)
            rounds.times.append(
                [
                    [t - m * took.made - p * took.passed for t, m, p in zip(*unit, strict=True)]
                    for unit in zip(whole, made, passed, strict=True)
                ]
            )
    return rounds


def _time_overhead(clock: Clock) -> _Overhead:
    x = torch.empty(4, 4, device=META)
    notes = NoteResults()
    with notes, torch.no_grad():
        _ = x + x
        x.view(16)
    added, viewed = notes.results
    with torch.no_grad():
        made = _time_loop(lambda: x + x, clock, RepeatResults([added] * SAMPLE))
        passed = _time_loop(lambda: x.view(16), clock, RepeatResults([viewed] * SAMPLE))
        plain = _time_loop(lambda: x.view(16), clock, None)
    return _Overhead(made=made, passed=max(0.0, passed - plain))


def _time_loop(run: Callable[[], Any], clock: Clock, mode: RepeatResults | None) -> float:
    with mode or nullcontext():
        start = clock()
        for _ in range(SAMPLE):
            run()
        return (clock() - start) / SAMPLE


def _timed(step: Callable[[Stopwatch], None], units: int, clock: Clock, active: AbstractContextManager[Any]) -> Times:
    with active:
        watch = Stopwatch(units, clock)
        step(watch)
    return watch.times


def _differentiate(model: nn.Module, total: torch.Tensor, watch: Stopwatch) -> None:
    watch.begin_backward()
    total.backward()
    watch.end()
    model.zero_grad(set_to_none=True)


@contextmanager
def _watched(model: nn.Module, names: list[str], watch: Stopwatch) -> Iterator[None]:
    """Tell the watch when each call begins, in forward and in backward."""
    position = 0

    def call(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal position
        if name not in names[position:]:
            return forward(*args, **kwargs)
        index = names.index(name, position)
        position = index + 1
        watch.enter(index)
        output = forward(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: watch.return_to(index))
                break
        if position == len(names):
            watch.enter(position)
        return output

    with replaced_forwards({name: model.get_submodule(name) for name in dict.fromkeys(names)}, call):
        yield


@contextmanager
def _without_collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _empty(slot: Slot) -> torch.Tensor:
    return torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device=META)
