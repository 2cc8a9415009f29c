"""The zoo's own judge, which knows nothing of `verify`: a plain PyTorch loop, and whether a strategy did the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshwright import Job
from meshwright.facts.job import NamedParameters

STEPS = 3
Values = dict[str, numpy.ndarray]


@dataclass
class Course:
    """What a training showed: its start, its losses, the gradients of step 1 and its end."""

    start: Values = field(default_factory=dict)
    unsaved: Values = field(default_factory=dict)
    """Buffers that are not saved and tensors that are plain attributes, at the start."""
    gradients: Values = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    end: Values = field(default_factory=dict)
    held: int = 0
    """Elements of parameters that a rank updates."""


def to_numpy(named: Iterable[tuple[str, Tensor]]) -> Values:
    return {name: t.detach().cpu().resolve_conj().numpy().copy() for name, t in named if isinstance(t, Tensor)}


def unsaved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint would not bring back: non-persistent buffers, and tensors kept as plain attributes."""
    saved = set(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        plain = {k: v for k, v in vars(module).items() if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)}
        for name, tensor in {**module._buffers, **plain}.items():
            if tensor is not None and prefix + name not in saved and not tensor.is_meta:
                yield prefix + name, tensor


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """The same numbers from every generator that a seed governs."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return make()


def batch_of(job: Job, step: int) -> Any:
    assert job.sample is not None
    return seeded(lambda: job.sample(job.global_batch), 100 + step)


def in_double(job: Job) -> Job:
    """The same job in float64: `.double()` on the model that the builder gave, and on the floats of a batch."""
    build, sample = job.model, job.sample
    assert sample is not None
    return replace(job, model=lambda: build().double(), sample=lambda n: _double(sample(n)))


def without_dropout(job: Job) -> Job:
    """The same job with every chance to drop something set to 0, on modules and in configs."""

    def build() -> nn.Module:
        model = job.model()
        configs = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "__dict__")]
        for holder in [*model.modules(), *configs]:
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(holder, DROPS))):
                    setattr(holder, name, 0.0)
        return model

    return replace(job, model=build)


DROPS = nn.modules.dropout._DropoutNd


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return type(value)({key: _double(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_double(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_double(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _double(getattr(value, f.name)) for f in fields(value)})
    return value


def for_gradients(job: Job) -> Job:
    """One step of this moves each parameter by its gradient, which can be read from any strategy's state."""
    return replace(job, optimizer=lambda params: torch.optim.SGD(params, lr=1.0), schedule=None, max_norm=None)


def plain_course(job: Job, *, steps: int = STEPS) -> Course:
    """Plain PyTorch: build, forward, loss, backward, clip, step."""
    course = Course()
    moved = seeded(job.model, 0).train()
    course.start, course.unsaved = to_numpy(state(moved)), to_numpy(unsaved_tensors(moved))
    list(_plain_steps(for_gradients(job), moved, 1))
    named = moved.named_parameters(remove_duplicate=False)
    course.gradients = {n: course.start[n] - p for n, p in to_numpy(named).items() if n in course.start}
    model = seeded(job.model, 0).train()
    course.losses = list(_plain_steps(job, model, steps))
    course.end = to_numpy(state(model))
    return course


def _plain_steps(job: Job, model: nn.Module, steps: int) -> Iterator[float]:
    parameters = NamedParameters((n, p) for n, p in model.named_parameters() if p.requires_grad)
    optimizer = job.optimizer(parameters)
    schedule = job.schedule(optimizer) if job.schedule else None
    for step in range(steps):
        optimizer.zero_grad()
        loss = _mean_loss(job, model, batch_of(job, step))
        loss.backward()
        if job.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, job.max_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step(*([loss.item()] if isinstance(schedule, ReduceLROnPlateau) else []))
        yield loss.item()


def state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return iter(model.state_dict(keep_vars=True).items())


def _mean_loss(job: Job, model: nn.Module, batch: Any) -> Tensor:
    given = job.inputs(batch)
    output = model(**given) if isinstance(given, Mapping) else model(*given)
    total, weight = job.loss(output, batch)
    return total / weight


def first_difference(plain: Course, found: Course, *, double: bool = True) -> str | None:
    """What is not plain PyTorch's, or None. The start must be equal in every bit; the rest to rounding."""
    for what in ("start", "unsaved"):
        for name, expected in getattr(plain, what).items():
            other = getattr(found, what).get(name)
            if other is None and what == "unsaved":
                continue  # on a stage that does not hold the module
            if other is None:
                return f"{what}: {name} is missing"
            if other.shape != expected.shape or not _same_bits(other, expected):
                return f"{what}: {name} is {_text(other)}, not {_text(expected)}"
    tolerance = 2e-7 if double else 2e-5  # losses and their weights are added up in float32 whatever the model's dtype
    largest = max((float(abs(g).max()) for g in plain.gradients.values() if g.size), default=1.0)
    for name, expected in plain.gradients.items():
        if name not in found.gradients:
            return f"gradient of {name} is missing"
        # A gradient is read as a difference of two weights, so it is rounded as they are.
        rounding = 4 * float(numpy.finfo(expected.dtype).eps * abs(plain.start[name]).max(initial=0.0))
        if worst := _off(found.gradients[name], expected, tolerance, floor=largest, rounding=rounding):
            return f"gradient of {name} is off by {worst}"
    for step, (one, other) in enumerate(zip(plain.losses, found.losses, strict=True), 1):
        if not abs(one - other) <= tolerance * max(abs(one), 1e-3):
            return f"loss of step {step} is {other:.9g}, not {one:.9g}"
    for name, expected in plain.end.items():
        if name not in found.end:
            return f"end: {name} is missing"
        if worst := _off(found.end[name], expected, 100 * tolerance, floor=1.0):
            return f"{name} after {len(plain.losses)} steps is off by {worst}"
    return None


def _same_bits(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _off(
    found: numpy.ndarray, expected: numpy.ndarray, tolerance: float, *, floor: float, rounding: float = 0.0
) -> str | None:
    """How far, where it is too far: of the tensor's largest number, and a little of the largest of all."""
    if found.shape != expected.shape:
        return f"a shape: {found.shape}, not {expected.shape}"
    if not expected.size:
        return None
    distance = float(abs(found.astype(complex) - expected).max())
    bound = tolerance * (float(abs(expected).max()) + 1e-2 * floor) + rounding
    return None if distance <= bound else f"{distance:.2e} of {float(abs(expected).max()):.2e}"


def _text(values: numpy.ndarray) -> str:
    return f"{values.dtype}{list(values.shape)} {values.reshape(-1)[:3].tolist()}"
