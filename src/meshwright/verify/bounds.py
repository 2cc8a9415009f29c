"""How far may two trainings be apart where only rounding separates them?

Strategies add the same numbers in another order. In float64 that is harmless: a sum of n numbers is off by n unit
roundoffs of their sizes at most, so a bound for a million of them is still a ten-billionth, and no defect is that
small. Gradients are compared before the optimizer sees them, because Adam divides a gradient by its own size: of an
element that is zero but for rounding (the bias of an attention's keys, say) it makes a full step in a direction that
rounding chose. How far a parameter may be off therefore follows from how exactly its gradient is known.

Some trainings blow rounding up all the same (a large learning rate, a ResNet in its third step), so the reference is
also run disturbed, with weights moved by one rounding before every step and sums in another order, and a strategy may
be a few times as far off as those runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from meshwright.verify.evidence import ROUNDING, Evidence, Reference, State

MARGIN = {"float64": 16.0, "fp32": 16.0, "bf16": 4.0, "fp16": 4.0}
"""How many times the measured effect of one rounding anything may differ by: a step rounds many times. Less in low
precision, where moving all weights is as much as computing with them does."""
SUMMED = 2.0**20
"""Numbers that a sum of float64 adds up: n of them are off by n unit roundoffs at most. More is covered by MARGIN."""
LOSS_BOUND = {"float64": SUMMED * 2.0**-53, "fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-9}
"""Relative, per step. fp32 is the contract; bf16 is 2 and fp16 4 roundings of a number that is a mean of many."""
NORM_BOUND = {"float64": 4 * SUMMED * 2.0**-53, "fp32": 1e-4, "bf16": 2.0**-5, "fp16": 2.0**-6}
"""Relative, per step: gradients go through the whole model twice, so they carry more roundings than the loss."""
GRADIENT_BOUND = {"float64": SUMMED * 2.0**-53, "fp32": 2.0**-13}
"""Of a gradient's largest element, relative to that. fp32's is the norm's bound: a worst case would allow anything."""
GLOBAL_SHARE = 2.0**-4
"""A gradient that cancels (the bias of an attention's keys) is as inexact as what it cancels from. So below this share
of the bound, relative to the largest gradient of the model, nothing is taken for a difference."""
STEP_ERROR = 8.0
"""How many times a gradient's relative error an optimizer's step may be off by: Adam's second moment has a square and
a root in it, a factor of clipping comes on top, and one step builds on the other."""
WRONG_SIGNS = 1 / 16
"""The share of a gradient's elements whose sign bf16 and fp16 may get wrong: gradients carry a few percent of noise
there, and Adam makes a full step of every sign. A rank that trains on its half of the batch gets a quarter wrong."""


@dataclass(frozen=True)
class Numbers:
    """One number a step, beside what the reference has and what rounding could make of it."""

    what: str
    found: list[float]
    exact: list[float]
    bounds: list[float]

    @property
    def distances(self) -> list[float]:
        return _relative(self.found, self.exact)

    def first_difference(self) -> str | None:
        for index, (distance, bound) in enumerate(zip(self.distances, self.bounds, strict=True)):
            if not distance <= bound:  # so that "not a number" counts as a difference
                values = f"{self.found[index]:.12g} where plain PyTorch has {self.exact[index]:.12g}"
                return f"{self.what} at step {index + 1}: {values}"
        return None


def losses_of(trace: Evidence, reference: Reference) -> Numbers:
    return _numbers("loss", LOSS_BOUND, reference, lambda one: one.losses, trace)


def norms_of(trace: Evidence, reference: Reference) -> Numbers:
    return _numbers("grad_norm", NORM_BOUND, reference, lambda one: one.norms, trace)


def _numbers(
    what: str, bounds: dict[str, float], reference: Reference, read: Callable[[Evidence], list[float]], trace: Evidence
) -> Numbers:
    precision, exact = arithmetic_of(reference), read(reference.exact)
    disturbed = zip(*(_relative(read(one), exact) for one in reference.disturbed), strict=True)
    allowed = [max(bounds[precision], MARGIN[precision] * max(distances)) for distances in disturbed]
    return Numbers(what, read(trace), exact, allowed)


def arithmetic_of(reference: Reference) -> str:
    """What it rounds as: a model that computes in fp32 in some places does so whatever its weights are."""
    return reference.narrow or reference.precision


def gradient_bounds(reference: Reference) -> dict[str, float]:
    """By parameter, how far an element of the first step's gradient may be off."""
    exact, precision = reference.exact.gradients or {}, arithmetic_of(reference)
    largest = max((_size(gradient) for gradient in exact.values()), default=0.0)
    relative = GRADIENT_BOUND.get(precision, math.inf)
    found = {}
    for name, gradient in exact.items():
        moved = [(one.gradients or {}).get(name) for one in reference.disturbed]
        measured = MARGIN[precision] * max((_distance(one, gradient) for one in moved), default=0.0)
        found[name] = max(relative * _size(gradient), relative * GLOBAL_SHARE * largest, measured)
    return found


def first_gradient(trace: Evidence, reference: Reference) -> str | None:
    """The first gradient of the first step that differs."""
    if trace.gradients is None or reference.exact.gradients is None:
        return None
    bounds = gradient_bounds(reference)
    for name, exact in reference.exact.gradients.items():
        found = trace.gradients.get(name)
        if found is None:
            if not _harmless(name, exact, trace, reference):
                return f"gradient of {name}: there is none, where plain PyTorch has one of size {_size(exact):.3g}"
            continue
        if found.shape != exact.shape:
            return f"gradient of {name}: {_shapes(found, exact)}"
        if not (distance := _distance(found, exact)) <= bounds[name]:
            how = f"differs by {distance:.3g} of {_size(exact):.3g} where {bounds[name]:.3g} could be rounding"
            return f"gradient of {name}: {how}, at step 1{_ratio(found, exact)}"
    for name, found in trace.gradients.items():
        if name not in reference.exact.gradients and not _harmless(name, found, trace, reference):
            zero = "zeros" if not found.any() else f"one of size {_size(found):.3g}"
            return f"gradient of {name}: there is {zero}, where plain PyTorch has none (its optimizer passes it over)"
    return None


def _harmless(name: str, only: torch.Tensor, trace: Evidence, reference: Reference) -> bool:
    """Whether the one gradient that there is of a parameter is zeros, and the optimizer made nothing of them."""
    apart = _distance(trace.last.get(name), reference.exact.last[name])
    return not only.any() and apart == 0.0


def _ratio(found: torch.Tensor, exact: torch.Tensor) -> str:
    """A gradient that is a multiple of the right one says so."""
    square = float(exact.double().square().sum())
    factor = float((found.double() * exact.double()).sum()) / square if square else math.nan
    off = float((found.double() - factor * exact.double()).norm())
    if math.isfinite(factor) and abs(factor - 1) > 1e-3 and off <= 1e-3 * math.sqrt(square):
        return f", it is {factor:.4g} times the right one"
    return ""


def first_of_start(found: State, exact: State) -> str | None:
    """Initial values are the builder's own, bit for bit."""
    for name, value in exact.items():
        if name not in found:
            return f"{name}: is missing at the start"
        if found[name].shape != value.shape:
            return f"{name}: {_shapes(found[name], value)}"
        if not torch.equal(found[name].to(value.dtype), value) and not _both_nan(found[name], value):
            return f"{name}: differs by {_distance(found[name], value):.3g} at the start, before any step"
    return None


def first_output(trace: Evidence, reference: Reference) -> str | None:
    """The model's outputs of the first step, before any gradient."""
    precision = arithmetic_of(reference)
    if len(trace.outputs) != len(reference.exact.outputs):
        return f"outputs: {len(trace.outputs)} tensors where plain PyTorch gives {len(reference.exact.outputs)}"
    for index, exact in enumerate(reference.exact.outputs):
        moved = [one.outputs[index] for one in reference.disturbed[:1] if index < len(one.outputs)]
        measured = max((_distance(one, exact) for one in moved), default=0.0)
        bound = max(LOSS_BOUND[precision] * _size(exact), MARGIN[precision] * measured)
        if not (distance := _distance(trace.outputs[index], exact)) <= bound:
            return f"output {index} of the model: differs by {distance:.3g} where {bound:.3g} could be rounding, step 1"
    return None


def first_state(trace: Evidence, reference: Reference, *, at_end: bool) -> str | None:
    """The first parameter or buffer that differs after the first step, or after the last."""

    def read(run: Evidence) -> State:
        return run.last if at_end else run.first

    found, exact, moved = read(trace), read(reference.exact), [read(one) for one in reference.disturbed]
    words = f"after step {len(trace.losses) if at_end else 1}"
    sizes = reference.exact.smallest if at_end else reference.exact.gradients or {}
    errors = dict(_gradient_errors(reference, sizes))
    farthest = max((_distance(exact[name], reference.exact.start[name]) for name in errors), default=0.0)
    for name, value in exact.items():
        if name not in found:
            return f"{name}: is missing {words}"
        if found[name].shape != value.shape:
            return f"{name}: {_shapes(found[name], value)}"
        if not value.numel():
            continue
        starts = [run.start[name].double() for run in (reference.exact, *reference.disturbed)]
        others = [one[name].double() for one in moved]
        if arithmetic_of(reference) in ("bf16", "fp16"):
            how = _differs_as_a_whole(starts, found[name].double(), value.double(), others)
        else:
            precision = arithmetic_of(reference)
            steps = None if name not in errors else _step_errors(errors[name], value.double() - starts[0], farthest)
            how = _differs(found[name].double(), value.double(), others, steps, precision)
        if how:
            return f"{name}: {how} {words}"
    return None


def _gradient_errors(reference: Reference, gradients: State) -> Iterator[tuple[str, torch.Tensor]]:
    """By element, how inexact the gradients of a parameter are, relative to themselves; 1 where they are noise."""
    for name, bound in gradient_bounds(reference).items():
        if name in gradients:
            yield name, (bound / gradients[name].double().abs().clamp_min(1e-300)).clamp_max(1.0)


def _step_errors(error: torch.Tensor, movement: torch.Tensor, farthest: float) -> torch.Tensor:
    """How far the steps of an optimizer may be off; one that divides noise by noise goes as far as anything does."""
    known = 2 * _size(movement) * (STEP_ERROR * error).clamp_max(1.0)
    return torch.where(error < 1.0, known, 2 * farthest)


def _differs(
    found: torch.Tensor,
    exact: torch.Tensor,
    moved: list[torch.Tensor],
    steps: torch.Tensor | None,
    precision: str,
) -> str | None:
    """An element is off by more than its own roundings, its gradient's error and a few times one rounding explain."""
    disturbed = max((_distance(other, exact) for other in moved), default=0.0)
    least = MARGIN[precision] * max(ROUNDING[precision] * max(_size(exact), _SMALL[precision]), disturbed)
    bounds = torch.full_like(exact, least) + (0.0 if steps is None else steps)
    excess = (found - exact).abs() - bounds
    if bool((excess <= 0).all()):
        return None
    place = int(torch.nan_to_num(excess, nan=math.inf).argmax())
    distance, bound = float((found - exact).abs().reshape(-1)[place]), float(bounds.reshape(-1)[place])
    return f"differs by {distance:.3g} where {bound:.3g} could be rounding"


_SMALL = {"float64": 0.0, "fp32": 1e-2}
"""Tensors whose elements are all smaller than this are held to its roundings: a bias of zeros has none of its own."""


def _differs_as_a_whole(
    starts: list[torch.Tensor], found: torch.Tensor, exact: torch.Tensor, moved: list[torch.Tensor]
) -> str | None:
    """The movement from the start is turned by more than wrong signs explain, or a few times one rounding."""
    movement = exact - starts[0]
    # A small tensor may be unlucky: three standard deviations of the share. A wrong sign is off by twice a step.
    unlucky = 3 * math.sqrt(WRONG_SIGNS * (1 - WRONG_SIGNS) / movement.numel())
    turn = 2 * math.sqrt(WRONG_SIGNS + unlucky) * float(movement.norm())
    others = zip(moved, starts[1:], strict=True)
    disturbed = max((float((other - start - movement).norm()) for other, start in others), default=0.0)
    least = MARGIN["fp32"] * ROUNDING["fp32"] * float(exact.norm())
    bound = max(turn, MARGIN["bf16"] * disturbed, least)
    distance = float((found - exact).norm())
    return None if distance <= bound else f"is {distance:.3g} away where {bound:.3g} could be rounding (2-norms)"


def largest_gradient_error(trace: Evidence, reference: Reference) -> float | None:
    """Relative to the largest gradient of the model."""
    if trace.gradients is None or reference.exact.gradients is None:
        return None
    exact = reference.exact.gradients
    largest = max((_size(gradient) for gradient in exact.values()), default=0.0)
    apart = [_distance(trace.gradients.get(name), gradient) for name, gradient in exact.items()]
    return max(apart, default=0.0) / max(largest, 1e-300)


def largest_distance(found: State, exact: State) -> float:
    return max((_distance(found.get(name), value) for name, value in exact.items()), default=0.0)


def _shapes(found: torch.Tensor, exact: torch.Tensor) -> str:
    return f"has shape {tuple(found.shape)} where plain PyTorch has {tuple(exact.shape)}"


def _both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_floating_point() and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other.to(one.dtype)))


def _size(tensor: torch.Tensor) -> float:
    """The largest element."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _distance(one: torch.Tensor | None, other: torch.Tensor) -> float:
    if one is None or one.shape != other.shape:
        return math.inf
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _relative(found: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)]
