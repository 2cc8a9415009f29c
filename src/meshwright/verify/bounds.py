"""Bounds on how far two trainings may differ if only rounding separates them.

Strategies add the same numbers in another order. In float64 that is harmless: a sum of n numbers is off by at most n
unit roundoffs of their sizes. The bound for a million numbers is one ten-billionth, smaller than any defect.

Gradients are compared before the optimizer uses them, because Adam divides a gradient by its size. An element that is
zero except for rounding (such as the bias of attention keys) gets a full step in a direction that rounding chose. The
bound of a parameter therefore follows from the error of its gradient.

Some trainings amplify rounding (a large learning rate, a ResNet in its third step). So the reference is also run
disturbed: weights move by one rounding before every step, and sums are taken in another order. A strategy may differ
by a few times as much as those runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from meshwright.facts.precision import FORMATS
from meshwright.verify.evidence import ROUNDING, Evidence, Reference, State

MARGIN = {"float64": 16.0, "fp32": 16.0, "bf16": 4.0, "fp16": 4.0, "fp8": 4.0}
"""Allowed multiple of the measured effect of one rounding: a step rounds many times. Smaller in low precision, where
moving all weights has as much effect as computing with them."""
SUMMED = 2.0**20
"""Assumed length of a float64 sum: n numbers are off by at most n unit roundoffs. MARGIN covers longer sums."""
LOSS_BOUND = {"float64": SUMMED * 2.0**-53, "fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-9, "fp8": 2.0**-5}
"""Relative, per step. fp32 is our promise; bf16 allows 2 roundings and fp16 4 of a mean over many numbers. fp8 allows
half a rounding to e4m3 (2**-4): its scales are powers of two, so strategies round alike where bf16 was the same."""
NORM_BOUND = {"float64": 4 * SUMMED * 2.0**-53, "fp32": 1e-4, "bf16": 2.0**-5, "fp16": 2.0**-6, "fp8": 2.0**-4}
"""Relative, per step. Gradients pass through the whole model twice, so they carry more roundings than the loss. In fp8
each layer rounds them to e5m2 (2**-3), with random signs; half of one is allowed."""
GRADIENT_BOUND = {"float64": SUMMED * 2.0**-53, "fp32": 2.0**-13}
"""Relative to a gradient's largest element. For fp32 the norm's bound: a worst-case bound would allow anything."""
GLOBAL_SHARE = 2.0**-4
"""A gradient whose terms cancel (the bias of attention keys) is as inexact as its terms. So nothing below this share of
the bound, relative to the largest gradient of the model, counts as a difference."""
STEP_ERROR = 8.0
"""Allowed multiple of a gradient's relative error in an optimizer's step: Adam's second moment has a square and a root,
clipping adds a factor, and steps build on each other."""
WRONG_SIGNS = 1 / 16
"""Allowed share of a gradient's elements with a wrong sign in bf16 and fp16: gradients have a few percent of noise, and
Adam makes a full step of every sign. A rank that trains on only its half of the batch gets a quarter wrong."""


def reduction_error(reference: Reference) -> float:
    """Relative error of a sum of gradients that ranks round to bf16 and add up in bf16 (`reduce=bf16`); else 0.

    A sum over n ranks rounds each summand once and each of n - 1 partial sums once. Roundings have random signs, so
    they add up like sqrt(n) of them. An element smaller than this share of its peers may also get the wrong sign.
    """
    ranks = reference.reduced_over
    return math.sqrt(ranks) * ROUNDING["bf16"] if ranks > 1 else 0.0


@dataclass(frozen=True)
class Numbers:
    """One number per step, with the reference's value and the bound."""

    what: str
    found: list[float]
    exact: list[float]
    bounds: list[float]

    @property
    def distances(self) -> list[float]:
        return _relative(self.found, self.exact)

    def first_difference(self) -> str | None:
        for index, (distance, bound) in enumerate(zip(self.distances, self.bounds, strict=True)):
            if not distance <= bound:  # NaN counts as a difference
                values = f"{self.found[index]:.12g} where plain PyTorch has {self.exact[index]:.12g}"
                return f"{self.what} at step {index + 1}: {values}"
        return None


def losses_of(trace: Evidence, reference: Reference) -> Numbers:
    return _numbers("loss", LOSS_BOUND[arithmetic_of(reference)], reference, lambda one: one.losses, trace)


def norms_of(trace: Evidence, reference: Reference) -> Numbers:
    bound = NORM_BOUND[arithmetic_of(reference)] + reduction_error(reference)
    return _numbers("grad_norm", bound, reference, lambda one: one.norms, trace)


def _numbers(
    what: str, bound: float, reference: Reference, read: Callable[[Evidence], list[float]], trace: Evidence
) -> Numbers:
    precision, exact = arithmetic_of(reference), read(reference.exact)
    disturbed = zip(*(_relative(read(one), exact) for one in reference.disturbed), strict=True)
    allowed = [max(bound, MARGIN[precision] * max(distances)) for distances in disturbed]
    return Numbers(what, read(trace), exact, allowed)


def arithmetic_of(reference: Reference) -> str:
    """The precision that a reference rounds to: a model may compute in fp32 in places whatever its weights are."""
    return reference.narrow or reference.precision


def gradient_bounds(reference: Reference) -> dict[str, float]:
    """By parameter, the allowed error of an element of the first step's gradient."""
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
    """Whether a gradient that only one side has is all zeros and did not change the parameter."""
    return not only.any() and _distance(trace.last.get(name), reference.exact.last[name]) == 0.0


def _ratio(found: torch.Tensor, exact: torch.Tensor) -> str:
    """Words for a gradient that is a multiple of the right one; empty otherwise."""
    square = float(exact.double().square().sum())
    factor = float((found.double() * exact.double()).sum()) / square if square else math.nan
    off = float((found.double() - factor * exact.double()).norm())
    if math.isfinite(factor) and abs(factor - 1) > 1e-3 and off <= 1e-3 * math.sqrt(square):
        return f", it is {factor:.4g} times the right one"
    return ""


def first_of_start(found: State, exact: State) -> str | None:
    """The first initial value that differs, by a single bit, from the builder's."""
    for name, value in exact.items():
        if name not in found:
            return f"{name}: is missing at the start"
        if found[name].shape != value.shape:
            return f"{name}: {_shapes(found[name], value)}"
        if not torch.equal(found[name].to(value.dtype), value) and not _both_nan(found[name], value):
            return f"{name}: differs by {_distance(found[name], value):.3g} at the start, before any step"
    return None


def first_output(trace: Evidence, reference: Reference) -> str | None:
    """The first output of the model that differs, in the first step. Other micro-batches have other outputs."""
    if len(trace.outputs) != len(reference.exact.outputs):
        return None
    precision = arithmetic_of(reference)
    found, expected = _all_outputs(trace), _all_outputs(reference.exact)
    if len(found) != len(expected):
        return f"outputs: {len(found)} tensors where plain PyTorch gives {len(expected)}"
    moved = _all_outputs(reference.disturbed[0]) if reference.disturbed else []
    for index, exact in enumerate(expected):
        measured = _distance(moved[index], exact) if index < len(moved) else 0.0
        bound = max(LOSS_BOUND[precision] * _size(exact), MARGIN[precision] * measured)
        if not (distance := _distance(found[index], exact)) <= bound:
            return f"output {index} of the model: differs by {distance:.3g} where {bound:.3g} could be rounding, step 1"
    return None


def _all_outputs(run: Evidence) -> list[torch.Tensor]:
    return [tensor for outputs in run.outputs for tensor in outputs]


def first_state(trace: Evidence, reference: Reference, *, at_end: bool) -> str | None:
    """The first parameter or buffer that differs after the first step, or after the last."""

    def read(run: Evidence) -> State:
        return run.last if at_end else run.first

    found, exact, moved = read(trace), read(reference.exact), [read(one) for one in reference.disturbed]
    precision = arithmetic_of(reference)
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
        if precision in FORMATS and FORMATS[precision].is_low:
            share = WRONG_SIGNS + reduction_error(reference)
            how = _differs_as_a_whole(starts, found[name].double(), value.double(), others, share)
        else:
            steps = None if name not in errors else _step_errors(errors[name], value.double() - starts[0], farthest)
            how = _differs(found[name].double(), value.double(), others, steps, precision)
        if how:
            return f"{name}: {how} {words}"
    return None


def _gradient_errors(reference: Reference, gradients: State) -> Iterator[tuple[str, torch.Tensor]]:
    """By parameter, the relative error of each element of its gradient; 1 where the element is noise."""
    for name, bound in gradient_bounds(reference).items():
        if name in gradients:
            yield name, (bound / gradients[name].double().abs().clamp_min(1e-300)).clamp_max(1.0)


def _step_errors(error: torch.Tensor, movement: torch.Tensor, farthest: float) -> torch.Tensor:
    """Allowed error of the optimizer's steps; where it divides noise by noise, as much as the largest movement."""
    known = 2 * _size(movement) * (STEP_ERROR * error).clamp_max(1.0)
    return torch.where(error < 1.0, known, 2 * farthest)


def _differs(
    found: torch.Tensor, exact: torch.Tensor, moved: list[torch.Tensor], steps: torch.Tensor | None, precision: str
) -> str | None:
    """Words if an element is off by more than its roundings, its gradient's error and the disturbed runs explain."""
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
"""Tensors with only smaller elements are allowed the roundings of this size: a bias of zeros has no roundings."""


def _differs_as_a_whole(
    starts: list[torch.Tensor], found: torch.Tensor, exact: torch.Tensor, moved: list[torch.Tensor], share: float
) -> str | None:
    """Words if the movement from the start differs by more than a share of wrong signs or disturbed runs explain."""
    movement = exact - starts[0]
    # Small tensors vary: allow three standard deviations of the share. A wrong sign is off by two steps.
    unlucky = 3 * math.sqrt(share * (1 - share) / movement.numel())
    turn = 2 * math.sqrt(share + unlucky) * float(movement.norm())
    others = zip(moved, starts[1:], strict=True)
    disturbed = max((float((other - start - movement).norm()) for other, start in others), default=0.0)
    bound = max(turn, MARGIN["bf16"] * disturbed, MARGIN["fp32"] * ROUNDING["fp32"] * float(exact.norm()))
    distance = float((found - exact).norm())
    return None if distance <= bound else f"is {distance:.3g} away where {bound:.3g} could be rounding (2-norms)"


def largest_gradient_error(trace: Evidence, reference: Reference) -> float | None:
    """The largest error of a gradient, relative to the largest gradient of the model."""
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
    """The largest absolute value."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _distance(one: torch.Tensor | None, other: torch.Tensor) -> float:
    if one is None or one.shape != other.shape:
        return math.inf
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _relative(found: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)]
