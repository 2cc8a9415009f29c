"""Whether a strategy trains as its reference does, and if not, what differs first."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.verify.bounds import (
    Numbers,
    first_gradient,
    first_of_start,
    first_output,
    first_state,
    largest_distance,
    largest_gradient_error,
    losses_of,
    norms_of,
)
from meshwright.verify.evidence import Evidence, Reference, State

EQUAL, DIFFERS, REFUSED, FAILED = "equal", "differs", "refused", "failed"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one strategy compares with plain PyTorch."""

    strategy: str
    reference: str | None
    """What it was compared with; None where it was not."""
    status: str
    """equal, differs, refused (it cannot run on this job or these ranks) or failed (its ranks did)."""
    equal: bool
    loss_max_rel: float | None = None
    grad_norm_max_rel: float | None = None
    grad_max_rel: float | None = None
    """Of the first step, relative to the largest gradient of the model; None where no gradients could be read."""
    param_max_abs: float | None = None
    first_difference: str | None = None
    """The first thing that differs in the order of a step, then the first loss and the first gradient norm that do; or
    why it was refused or failed."""
    cause: str | None = None
    """Why it differs, where an experiment has shown it."""
    precision: str | None = None
    """Of the arithmetic in which they were compared."""
    bounds: dict[str, float] | None = None
    note: str | None = None
    """What the verdict does not speak of."""

    def to_json(self) -> dict[str, Any]:
        """JSON knows no infinity: a number that is none is null."""
        numbers = {key: value for key, value in asdict(self).items() if isinstance(value, float)}
        return asdict(self) | {key: value if math.isfinite(value) else None for key, value in numbers.items()}


def judge(text: str, trace: Evidence, reference: Reference) -> Verdict:
    """Compare what a strategy left behind with what its reference did."""
    losses, norms = losses_of(trace, reference), norms_of(trace, reference)
    found = [*_first_tensors(trace, reference), losses.first_difference(), norms.first_difference()]
    differences = [difference for difference in found if difference is not None]
    return Verdict(
        strategy=text,
        reference=reference.words,
        status=DIFFERS if differences else EQUAL,
        equal=not differences,
        loss_max_rel=max(losses.distances),
        grad_norm_max_rel=max(norms.distances),
        grad_max_rel=largest_gradient_error(trace, reference),
        param_max_abs=largest_distance(trace.last, reference.exact.last),
        first_difference="; ".join(differences) or None,
        precision=reference.precision,
        bounds={"loss_rel": max(losses.bounds), "grad_norm_rel": max(norms.bounds)},
        note=reference.note,
    )


def _first_tensors(trace: Evidence, reference: Reference) -> list[str | None]:
    """In the order in which a step makes them, because what comes first is nearest to the cause; a copy as well."""
    exact, alone = reference.exact, bool(trace.outputs)
    at_first = (
        first_of_start(trace.start, exact.start)
        or first_of_start(trace.kept, exact.kept if alone else _common(exact.kept, trace.kept))
        or (first_output(trace, reference) if trace.outputs else None)
        or first_gradient(trace, reference)
        or first_state(trace, reference, at_end=False)
    )
    at_end = None if at_first else first_state(trace, reference, at_end=True)
    step, copy = next(iter(trace.copies.items()), (0, None))
    return [copy, at_first, at_end] if step == 0 else [at_first, copy, at_end]


def _common(exact: State, found: State) -> State:
    """A stage of a pipeline does not keep what others do."""
    return {name: value for name, value in exact.items() if name in found}


def judge_loss(text: str, trace: Evidence, plain: Evidence, reference: Reference) -> Verdict:
    """Compare losses alone: our bf16 and autocast round different things, so nothing finer could be equal."""
    bounds = losses_of(trace, reference).bounds
    losses = Numbers("loss", trace.losses, plain.losses, bounds)
    difference = losses.first_difference()
    return Verdict(
        strategy=text,
        reference=f"plain PyTorch under autocast to {reference.precision}, losses only",
        status=DIFFERS if difference else EQUAL,
        equal=difference is None,
        loss_max_rel=max(losses.distances),
        first_difference=difference,
        precision=reference.precision,
        bounds={"loss_rel": max(bounds)},
    )


def without_verdict(strategy: str, status: str, reason: str) -> Verdict:
    """A strategy that was refused, or whose ranks failed."""
    return Verdict(strategy=strategy, reference=None, status=status, equal=False, first_difference=reason)
