"""Prove that a strategy trains as one process does, or name the first thing that differs.

Each strategy takes a few optimizer steps from one seed on the same global batches as one process does, with dropout
off. Losses, gradient norms, parameters and buffers are compared.

How far may they be apart? Strategies add the same numbers in another order, and training can blow the rounding up:
Adam turns a gradient that is zero but for rounding (the bias of an attention's keys, say) into a full step, and a
large learning rate makes the third loss of a ResNet differ by 1e-4 if its weights were moved by 1e-7. So the bound is
measured: the reference is run twice more with weights moved by one rounding (in fp32 before every step), and a strategy
may be a few times as far from the reference as those runs are. Under bf16 and fp16 rounding decides the sign of whole
steps, so there a parameter's movement from its start is compared as a whole.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.build.batch import micro_steps
from meshwright.build.check import check
from meshwright.build.step import Trainer
from meshwright.build.world import World
from meshwright.describe.model import make_batch
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.runtime.place import place_of

ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Unit roundoff: the largest relative error of one rounding."""
MARGIN = {"fp32": 16.0, "bf16": 4.0, "fp16": 4.0}
"""How many times the measured effect of moving all weights by one rounding anything may differ by: a step rounds many
times. Less in low precision, where moving all weights is as much as computing with them does."""
WRONG_SIGNS = 1 / 16
"""The share of a gradient's elements whose sign bf16 and fp16 may get wrong: gradients carry a few percent of noise
there, and Adam makes a full step of every sign. A rank that trains on its half of the batch gets a quarter wrong."""
LOSS_SCALE = 2.0**8
"""fp16's, held low: at the usual 2**16 one process overflows where the smaller parts of its ranks do not, and skips."""
LOSS_BOUND = {"fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-9}
"""Relative, per step. fp32 is the contract; bf16 is 2 and fp16 4 roundings of a number that is a mean of many."""
NORM_BOUND = {"fp32": 1e-4, "bf16": 2.0**-5, "fp16": 2.0**-6}
"""Relative, per step: gradients go through the whole model twice, so they carry more roundings than the loss."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a few steps left behind."""

    losses: list[float]
    norms: list[float]
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers before the first step."""
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers after the first step: where the cause of a difference is still to be seen."""
    last: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one strategy compares with one process."""

    strategy: str
    reference: str
    equal: bool
    loss_max_rel: float
    grad_norm_max_rel: float
    param_max_abs: float
    first_difference: str | None
    """The first parameter that differs, then the first loss and the first gradient norm that do."""
    bounds: dict[str, float]


Plant = Callable[[Trainer], None]
"""Spoils a trainer on purpose; tests use it to see that a defect is found."""


def verify(
    job: Job,
    facts: ModelFacts,
    strategies: Sequence[str],
    world: World,
    *,
    steps: int = 3,
    seed: int = 0,
    plant: Plant | None = None,
) -> Iterator[Verdict]:
    """One verdict a strategy, on every rank alike. Rank 0 also runs the references."""
    references: dict[str, tuple[Trace, list[Trace]]] = {}
    for text in strategies:
        resolved = check(job, facts, Strategy.parse(text), place_of(world))
        reference = reference_of(resolved, facts, job.global_batch)
        if world.is_main and str(reference) not in references:
            one = World(device=world.device)
            runs = [run_steps(job, facts, reference, one, steps=steps, seed=seed, moved_by=n) for n in range(3)]
            references[str(reference)] = runs[0], runs[1:]
        trace = run_steps(job, facts, resolved, world, steps=steps, seed=seed, plant=plant)
        verdict = _judge(text, reference, trace, *references[str(reference)]) if world.is_main else None
        yield world.gather(verdict)[0]


def reference_of(strategy: Strategy, facts: ModelFacts, global_batch: int) -> Strategy:
    """One process with the same precision. Where there is BatchNorm, also with the same samples in each statistic."""
    ranks = strategy.data_ranks
    count = micro_steps(global_batch, ranks, strategy.micro_batch)
    size = -(-global_batch // count) if facts.batch_norms and count > 1 else None
    return Strategy(data="single", precision=strategy.precision, pure=strategy.pure, micro_batch=size)


def run_steps(
    job: Job,
    facts: ModelFacts,
    strategy: Strategy,
    world: World,
    *,
    steps: int,
    seed: int,
    plant: Plant | None = None,
    moved_by: int = 0,
) -> Trace:
    """Take a few steps on made-up batches and keep what is compared; `moved_by` numbers a disturbance by rounding."""
    trainer = Trainer(job, facts, strategy, world, seed=seed)
    _switch_dropout_off(trainer.engine.model)
    if plant is not None:
        plant(trainer)
    if trainer.loss_scale:
        trainer.loss_scale.value = LOSS_SCALE
    trace = Trace(losses=[], norms=[])
    if moved_by:
        _move_by_rounding(trainer, seed=moved_by * steps)
    trace.start.update(_state(trainer))
    for index in range(steps):
        if moved_by and index and strategy.precision == "fp32":
            _move_by_rounding(trainer, seed=moved_by * steps + index)
        with NoDropout():
            result = trainer.step(seeded_batch(job, seed + index))
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        if index == 0:
            trace.first.update(_state(trainer))
    trace.last.update(_state(trainer))
    return trace


def seeded_batch(job: Job, seed: int) -> Any:
    """A global batch of made-up samples that every rank makes alike."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make_batch(job, job.global_batch)
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


class NoDropout(TorchFunctionMode):
    """Dropout functions pass their input through, and attention drops nothing."""

    FUNCTIONS = (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}  # which it asks for dropout alone
        return func(*args, **kwargs)


def _switch_dropout_off(model: nn.Module) -> None:
    """Also on the modules: backward may recompute in a thread of its own, where the mode is not active."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


def _move_by_rounding(trainer: Trainer, seed: int) -> None:
    """By up to a unit in the last place: in fp64, because most of it would be lost in the parameter's own dtype."""
    generator = torch.Generator().manual_seed(seed)
    last_place = 2 * ROUNDING[trainer.strategy.precision]
    with torch.no_grad():
        for parameter in trainer.engine.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.copy_(parameter.double() * (1 + last_place * noise.to(parameter.device)))


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0; the other ranks take part and keep nothing."""
    state = {}
    for name, tensor in trainer.engine.state():
        if trainer.world.is_main:
            state[name] = tensor.detach().to("cpu", copy=True)
    return state


def _judge(text: str, reference: Strategy, trace: Trace, exact: Trace, moved: list[Trace]) -> Verdict:
    precision = reference.precision
    margin = MARGIN[precision]
    losses = Numbers("loss", trace.losses, exact.losses, [m.losses for m in moved], LOSS_BOUND[precision], margin)
    norms = Numbers("grad_norm", trace.norms, exact.norms, [m.norms for m in moved], NORM_BOUND[precision], margin)
    differs = _differs_in_fp32 if precision == "fp32" else _differs_in_low_precision
    starts = [run.start for run in (exact, *moved)]
    at_end = f"after step {len(trace.losses)}"
    found = [
        _first_state(differs, starts, trace.first, exact.first, [m.first for m in moved], "after step 1")
        or _first_state(differs, starts, trace.last, exact.last, [m.last for m in moved], at_end),
        losses.first_difference(),
        norms.first_difference(),
    ]
    differences = [difference for difference in found if difference is not None]
    return Verdict(
        strategy=text,
        reference=str(reference),
        equal=not differences,
        loss_max_rel=max(losses.distances),
        grad_norm_max_rel=max(norms.distances),
        param_max_abs=max(_distance(trace.last[name], exact.last[name]) for name in exact.last if name in trace.last),
        first_difference="; ".join(differences) or None,
        bounds={"loss_rel": max(losses.bounds), "grad_norm_rel": max(norms.bounds)},
    )


@dataclass(frozen=True)
class Numbers:
    """One number a step, beside what one process has and what rounding could make of it."""

    what: str
    found: list[float]
    exact: list[float]
    moved: list[list[float]]
    least_bound: float
    margin: float

    @property
    def distances(self) -> list[float]:
        return _relative(self.found, self.exact)

    @property
    def bounds(self) -> list[float]:
        disturbed = zip(*(_relative(moved, self.exact) for moved in self.moved), strict=True)
        return [max(self.least_bound, self.margin * max(distances)) for distances in disturbed]

    def first_difference(self) -> str | None:
        for index, (distance, bound) in enumerate(zip(self.distances, self.bounds, strict=True)):
            if not distance <= bound:  # so that "not a number" counts as a difference
                values = f"{self.found[index]:.8g} where one process has {self.exact[index]:.8g}"
                return f"{self.what} at step {index + 1}: {values}"
        return None


State = dict[str, torch.Tensor]


def _first_state(
    differs: Callable[..., str | None], starts: list[State], found: State, exact: State, moved: list[State], when: str
) -> str | None:
    """The first tensor that differs. `starts` are the reference's and the moved runs'."""
    for name in exact:
        if name not in found:
            return f"{name}: is missing {when}"
        if found[name].shape != exact[name].shape:
            return f"{name}: has shape {tuple(found[name].shape)} where one process has {tuple(exact[name].shape)}"
        states = ([run[name].double() for run in runs] for runs in (starts, [found], [exact], moved))
        if exact[name].numel() and (how := differs(*states)):
            return f"{name}: {how} {when}"
    return None


Tensors = list[torch.Tensor]


def _differs_in_fp32(starts: Tensors, found: Tensors, exact: Tensors, moved: Tensors) -> str | None:
    """More than a few units of the largest element, and than a few times what one rounding was seen to do."""
    disturbed = max(_distance(other, exact[0]) for other in moved)
    bound = MARGIN["fp32"] * max(ROUNDING["fp32"] * max(float(exact[0].abs().max()), 1e-2), disturbed)
    distance = _distance(found[0], exact[0])
    return None if distance <= bound else f"differs by {distance:.3g} where {bound:.3g} could be rounding"


def _differs_in_low_precision(starts: Tensors, found: Tensors, exact: Tensors, moved: Tensors) -> str | None:
    """The movement from the start is turned by more than wrong signs explain, or a few times one rounding."""
    movement = exact[0] - starts[0]
    # A small tensor may be unlucky: three standard deviations of the share. A wrong sign is off by twice a step.
    unlucky = 3 * math.sqrt(WRONG_SIGNS * (1 - WRONG_SIGNS) / movement.numel())
    turn = 2 * math.sqrt(WRONG_SIGNS + unlucky) * float(movement.norm())
    others = zip(moved, starts[1:], strict=True)
    disturbed = max(float((other - start - movement).norm()) for other, start in others)
    least = MARGIN["fp32"] * ROUNDING["fp32"] * float(exact[0].norm())
    bound = max(turn, MARGIN["bf16"] * disturbed, least)
    distance = float((found[0] - exact[0]).norm())
    return None if distance <= bound else f"is {distance:.3g} away where {bound:.3g} could be rounding (2-norms)"


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _relative(found: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)]
