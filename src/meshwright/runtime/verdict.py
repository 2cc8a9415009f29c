"""How far may a strategy be from one process? Judged by bounds that are measured.

Strategies add the same numbers in another order, and training can blow the rounding up:
Adam turns a gradient that is zero but for rounding (the bias of an attention's keys, say) into a full step, and a
large learning rate makes the third loss of a ResNet differ by 1e-4 if its weights were moved by 1e-7. So the bound is
measured: the reference is run twice more with weights moved by one rounding (in fp32 before every step), once of them
with the samples of each batch in another order, and a strategy may be a few times as far from the reference as those
runs are. Under bf16 and fp16 rounding decides the sign of whole
steps, so there a parameter's movement from its start is compared as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from meshwright.facts.strategy import Strategy

ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Unit roundoff: the largest relative error of one rounding."""
MARGIN = {"fp32": 16.0, "bf16": 4.0, "fp16": 4.0}
"""How many times the measured effect of moving all weights by one rounding anything may differ by: a step rounds many
times. Less in low precision, where moving all weights is as much as computing with them does."""
WRONG_SIGNS = 1 / 16
"""The share of a gradient's elements whose sign bf16 and fp16 may get wrong: gradients carry a few percent of noise
there, and Adam makes a full step of every sign. A rank that trains on its half of the batch gets a quarter wrong."""
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
    note: str | None = None
    """What the verdict does not speak of."""

    def to_json(self) -> dict[str, Any]:
        """JSON knows no infinity: a number that is none is null."""
        numbers = {key: value for key, value in asdict(self).items() if isinstance(value, float)}
        return asdict(self) | {key: value if math.isfinite(value) else None for key, value in numbers.items()}


def judge(text: str, reference: Strategy, trace: Trace, exact: Trace, moved: list[Trace]) -> Verdict:
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
        param_max_abs=max((_distance(trace.last.get(name), value) for name, value in exact.last.items()), default=0.0),
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


def _distance(one: torch.Tensor | None, other: torch.Tensor) -> float:
    if one is None or one.shape != other.shape:
        return math.inf
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _relative(found: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)]
