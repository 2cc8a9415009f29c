"""Find the properties of a job's optimizer and schedule by running them on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import JobError, one_line
from meshwright.facts.job import Job, NamedParameters
from meshwright.facts.lr_schedule import refuse_schedule, required
from meshwright.recording.blueprint import model_to_read
from meshwright.recording.seeding import seed_torch

SMALL, LARGE = 8, 128
"""The longest dim of tensors that are not stepped, and of those that are: some optimizers factor only long dims."""
STEPS = 3
FAR = 1e-4
"""How much two updates must differ, relative to the largest number in them. Tensors are float64."""

Lay = Callable[[str, torch.Tensor], torch.Tensor]


def check_optimizer(job: Job, model: nn.Module) -> None:
    """Refuse an optimizer or a schedule that this loop cannot step."""
    try:
        optimizer = job.optimizer(_small_parameters(model))
        schedule = job.schedule(optimizer) if job.schedule is not None else None
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"Job(optimizer=..., schedule=...) raised {one_line(error)}") from error
    if not isinstance(optimizer, Optimizer):
        raise JobError(f"Job(optimizer=...) must return a torch optimizer, but it returned {type(optimizer).__name__}.")
    # The class's method: schedules replace the instance's.
    if wanted := required(type(optimizer).step)[1:]:
        raise JobError(
            f"{type(optimizer).__name__}.step() requires a {wanted[0].name}, to compute the loss several times, but "
            "here a step computes it once. Use an optimizer whose step() takes no argument, such as AdamW."
        )
    if schedule is not None:
        refuse_schedule(schedule, job.schedule_by)


def optimizer_name(job: Job) -> str:
    """The class of the job's optimizer, which is made for small parameters."""
    return type(job.optimizer(_small_parameters(model_to_read(job.model)))).__name__


def left_out(job: Job, model: nn.Module) -> tuple[str, ...]:
    """Trainable parameters that are in no group of the job's optimizer."""
    parameters = _small_parameters(model)
    groups = job.optimizer(parameters).param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return tuple(name for name, parameter in parameters.named() if id(parameter) not in held)


def optimizer_slots(job: Job, model: nn.Module) -> float:
    """Bytes of state per byte of parameter, measured on tiny parameters after one step; an average counts as state."""
    return _slots_of_optimizer(job, model) + (job.ema is not None)


def _slots_of_optimizer(job: Job, model: nn.Module) -> float:
    parameters = _small_parameters(model)
    optimizer = job.optimizer(parameters)
    # Stepping one parameter of each group and shape is enough: an optimizer skips those without a gradient.
    alike = {
        parameter: (number, parameter.shape)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    stepped = {kind: parameter for parameter, kind in alike.items()}
    for parameter in stepped.values():
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # perhaps it runs on GPUs only; assume the two moments of Adam
        if "closure" in str(error).lower():
            raise JobError(
                f"{type(optimizer).__name__}.step() raised {one_line(error)} It is called without a closure here."
            ) from error
        return 2.0
    held = {kind: _state_bytes(optimizer, parameter) for kind, parameter in stepped.items()}
    whole = sum(p.numel() * p.itemsize for p in parameters if p.dim() > 0)
    return sum(held[kind] for kind in alike.values()) / max(1, whole)


def couplings(job: Job, model: nn.Module) -> tuple[str, ...]:
    """What the update of one element depends on besides its own gradients: "rows", "columns", "parameters".

    A trust ratio or a factored moment depends on the whole tensor, and a norm inside the optimizer on all parameters.
    Such an optimizer computes other updates when it is given shards.
    """
    try:
        trial = OptimizerTrial(job, [(n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad])
        whole = trial.run()
        found = {
            "rows": differ(trial.first_half(whole, 0), trial.run(lambda name, value: _half(value, 0))),
            "columns": differ(trial.first_half(whole, 1), trial.run(lambda name, value: _half(value, 1))),
            "parameters": trial.has_others and differ(trial.unscaled(whole), trial.unscaled(trial.run(scaled=True))),
        }
    except Exception:  # perhaps it runs on GPUs only
        return ()
    return tuple(kind for kind, yes in found.items() if yes)


class OptimizerTrial:
    """A job's optimizer on made-up parameters with the model's names. One per group and number of dims is stepped."""

    def __init__(self, job: Job, shapes: list[tuple[str, tuple[int, ...]]]) -> None:
        self._job, self._shapes = job, shapes
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        self._stepped = self._choose()
        self.has_others = len(self._stepped) > 1

    def run(self, lay: Lay = lambda name, value: value, *, scaled: bool = False) -> dict[str, torch.Tensor]:
        """The change of each parameter after some steps. `lay(name, value)` is the part that a rank holds.

        `scaled` makes the gradients of every second parameter larger.
        """
        with torch.random.fork_rng(devices=[]):
            start = {name: lay(name, self._made_up(number, 0)) for number, (name, _) in enumerate(self._shapes)}
            parameters = {name: nn.Parameter(value.clone()) for name, value in start.items()}
            optimizer = self._job.optimizer(NamedParameters(parameters.items()))
            for step in range(1, STEPS + 1):
                seed_torch(step)
                for place, (name, number) in enumerate(self._stepped.items()):
                    gradient = self._made_up(number, step) * (3.0 if scaled and place % 2 else 1.0)
                    parameters[name].grad = lay(name, gradient)
                optimizer.step()
        return {name: parameters[name].detach() - start[name] for name in self._stepped}

    def first_half(self, moved: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
        return {name: _half(value, dim) for name, value in moved.items()}

    def unscaled(self, moved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters whose gradients `scaled` does not change."""
        return {name: moved[name] for place, name in enumerate(self._stepped) if place % 2 == 0}

    def _choose(self) -> dict[str, int]:
        """The largest parameter of each group and number of dims, with its index."""
        parameters = NamedParameters((name, nn.Parameter(torch.zeros(_clip(s, SMALL)))) for name, s in self._shapes)
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        largest: dict[tuple[int, int], int] = {}
        for group, members in enumerate(self._job.optimizer(parameters).param_groups):
            for number in (numbers[id(p)] for p in members["params"]):
                shape = self._shapes[number][1]
                other = largest.setdefault((group, len(shape)), number)
                if min(shape, default=0) > min(self._shapes[other][1], default=0):
                    largest[group, len(shape)] = number
        return {self._shapes[number][0]: number for number in largest.values()}

    def _made_up(self, number: int, step: int) -> torch.Tensor:
        """A parameter (step 0) or its gradient. Every run starts from the same ones; do not change them."""
        if (number, step) not in self._values:
            self._values[number, step] = self._make_up(number, step)
        return self._values[number, step]

    def _make_up(self, number: int, step: int) -> torch.Tensor:
        name, shape = self._shapes[number]
        size = _clip(shape, SMALL)
        if name in self._stepped:
            size = [*_clip(shape[:2], LARGE if len(shape) < 3 else LARGE // 2), *_clip(shape[2:], 2)]
        generator = torch.Generator().manual_seed(1000 * step + number)
        value = torch.randn(size, generator=generator, dtype=torch.float64)
        for dim in range(value.dim()):  # a half must differ from the whole: weights grow along it, gradients shrink
            ramp = torch.linspace(1.0, 0.1, size[dim], dtype=torch.float64)
            value = value * (ramp if step else ramp.flip(0)).view([-1 if d == dim else 1 for d in range(value.dim())])
        return value


def _clip(shape: Iterable[int], longest: int) -> list[int]:
    return [min(size, longest) for size in shape]


def _half(value: torch.Tensor, dim: int) -> torch.Tensor:
    """The first half along a dim, if it can be halved. Contiguous, because fused kernels on CPUs ignore strides."""
    halved = value.dim() > dim and value.shape[dim] > 1
    return value.narrow(dim, 0, value.shape[dim] // 2).contiguous() if halved else value


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether updates of the same parameters differ by more than fp32 rounding."""
    return any(
        not torch.allclose(other[name], value, rtol=0, atol=FAR * float(value.abs().max()))
        for name, value in one.items()
        if value.numel()
    )


def _small_parameters(model: nn.Module) -> NamedParameters:
    """Tiny real parameters with the model's names, attributes and numbers of dims."""
    originals = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    pairs = ((n, nn.Parameter(torch.zeros(_clip(p.shape, SMALL)))) for n, p in originals.items())
    small = NamedParameters(pairs, whole=True)
    for name, parameter in small.named():
        vars(parameter).update(vars(originals[name]))
    return small


def _state_bytes(optimizer: Any, parameter: torch.Tensor) -> int:
    state = [value for value in optimizer.state.get(parameter, {}).values() if torch.is_tensor(value)]
    return sum(value.numel() * value.itemsize for value in state if value.dim() > 0)
