"""Time the host's part of a model's pass, unit by unit: its Python and autograd, on meta tensors and without modes.

Meta tensors have shapes only, so a pass over them takes what the host needs, and what PyTorch computes shapes with. The
latter is timed operator by operator in another pass, and subtracted: on a device, kernels are launched instead.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from meshwright.describe.as_on_cuda import composites_as_on_cuda
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
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.trees import tree_leaves
from meshwright.tracing.costs import LOSS
from meshwright.tracing.meter import is_view, strided_in

ROUNDS = 5
"""Timed passes; the shortest of each unit counts, because disturbances only add time."""
Clock = Callable[[], float]
Times = list[list[float]]
"""Seconds of forward and backward of each unit."""


def time_host_passes(job: Job, facts: ModelFacts, clock: Clock = time.perf_counter) -> HostPasses:
    """Host seconds of each unit's forward and backward; `JobError` if the model does not run on meta tensors."""
    blueprint = record(job.model, seed=0, values=False)
    model = blueprint.model.to(META)
    set_attributes(model, blueprint.attributes, _empty)
    batch = map_tensors(meta_of, make_batch(job, SAMPLES))
    names = [*(call.name for call in facts.calls), LOSS]

    def step(watch: Stopwatch) -> None:
        with _watched(model, names[:-1], watch):
            output = call_model(job, model, batch)
            total, _ = job.loss(output, batch)
            _differentiate(model, total, watch)

    errors = []
    # New tensors are on the CPU unless the model says otherwise; a default device costs a little at every function.
    for default in (nullcontext, lambda: torch.device(META)):
        try:
            with default(), composites_as_on_cuda():
                times = _own_times(step, len(names), clock)
            break
        except Exception as error:
            errors.append(error)
    else:
        raise JobError(f"The model's pass cannot be timed on meta tensors: {one_line(errors[-1])}") from errors[-1]
    units: dict[str, tuple[float, float]] = {}
    for name, (forward, backward) in zip(names, times, strict=True):
        before = units.get(name)  # a module may be called several times
        units[name] = (forward, backward) if before is None else (max(before[0], forward), max(before[1], backward))
    return HostPasses(units=units, reference=time_reference(clock))


def time_reference(clock: Clock = time.perf_counter) -> float:
    """Host seconds of forward and backward of a small fixed model: how fast this machine's host is."""
    with torch.device(META):
        blocks = [
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(8)
        ]
        model, x = nn.Sequential(*blocks), torch.empty(2, 16, 64)

    def step(watch: Stopwatch) -> None:
        watch.enter(0)
        _differentiate(model, model(x).sum(), watch)

    return sum(_own_times(step, 1, clock, rounds=4 * ROUNDS)[0])


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


class _Operators(TorchDispatchMode):
    """Times each operator that would run a kernel, apart from what calls it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._total = clock, 0.0

    def seconds(self) -> float:
        """Seconds in operators so far: a clock for a `Stopwatch`."""
        return self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self._clock()
        found = func(*args, **(kwargs or {}))
        taken = self._clock() - start
        if not is_view(func, strided_in((args, kwargs)), strided_in(found)):
            self._total += taken
        return found


def _own_times(step: Callable[[Stopwatch], None], units: int, clock: Clock, rounds: int = ROUNDS) -> Times:
    """The shortest times of the units, less what their operators take."""
    _timed(step, units, clock, nullcontext())  # it fills caches
    with _without_collector():
        whole = _shortest(_timed(step, units, clock, nullcontext()) for _ in range(rounds))
        inside = []
        for _ in range(rounds):
            mode = _Operators(clock)
            inside.append(_timed(step, units, mode.seconds, mode))
    shapes = _shortest(iter(inside))
    return [[max(0.0, a - b) for a, b in zip(own, other, strict=True)] for own, other in zip(whole, shapes, strict=True)]


def _timed(
    step: Callable[[Stopwatch], None], units: int, clock: Clock, active: AbstractContextManager[Any]
) -> Times:
    with active:
        watch = Stopwatch(units, clock)
        step(watch)
    return watch.times


def _shortest(rounds: Iterator[Times]) -> Times:
    return [[min(times) for times in zip(*unit, strict=True)] for unit in zip(*rounds, strict=True)]


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
    with ExitStack() as stack:
        stack.callback(gc.enable if was_on else gc.disable)
        gc.disable()
        yield


def _empty(slot: Slot) -> torch.Tensor:
    return torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device=META)
