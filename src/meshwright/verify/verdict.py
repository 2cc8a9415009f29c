"""Judge whether a strategy trains as its reference does, and if not, what differs first."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.describe.dtypes import DTYPES, WORDS
from meshwright.verify import bounds
from meshwright.verify.evidence import Evidence, Reference

EQUAL, DIFFERS, REFUSED, FAILED = "equal", "differs", "refused", "failed"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one strategy compares with plain PyTorch."""

    strategy: str
    reference: str | None
    """What it was compared with; None if it was not compared."""
    status: str
    """equal, differs, refused (it cannot run with this job or these ranks) or failed (its ranks failed)."""
    equal: bool
    loss_max_rel: float | None = None
    grad_norm_max_rel: float | None = None
    grad_max_rel: float | None = None
    """Of the first step, relative to the largest gradient of the model; None if gradients cannot be read."""
    param_max_abs: float | None = None
    first_difference: str | None = None
    """The first thing that differs in the order of a step, then the first loss and the first gradient norm that do; or
    why it was refused or failed."""
    cause: str | None = None
    """Why it differs, if an experiment has shown it."""
    precision: str | None = None
    """Of the arithmetic in which it was compared."""
    bounds: dict[str, float] | None = None
    note: str | None = None
    """What the verdict does not cover."""

    def to_json(self) -> dict[str, Any]:
        """As JSON, with null for infinity and NaN, which JSON does not have."""
        numbers = {key: value for key, value in asdict(self).items() if isinstance(value, float)}
        return asdict(self) | {key: value if math.isfinite(value) else None for key, value in numbers.items()}


def judge(text: str, trace: Evidence, reference: Reference) -> Verdict:
    """Compare a strategy's results with those of its reference."""
    losses, norms = bounds.losses_of(trace, reference), bounds.norms_of(trace, reference)
    found = [*_first_tensors(trace, reference), losses.first_difference(), norms.first_difference()]
    differences = [difference for difference in found if difference is not None]
    return Verdict(
        strategy=text,
        reference=reference.words,
        status=DIFFERS if differences else EQUAL,
        equal=not differences,
        loss_max_rel=max(losses.distances),
        grad_norm_max_rel=max(norms.distances),
        grad_max_rel=bounds.largest_gradient_error(trace, reference),
        param_max_abs=bounds.largest_distance(trace.last, reference.exact.last),
        first_difference="; ".join(differences) or None,
        precision=reference.precision,
        bounds={"loss_rel": max(losses.bounds), "grad_norm_rel": max(norms.bounds)},
        note=reference.note,
    )


def _first_tensors(trace: Evidence, reference: Reference) -> list[str | None]:
    """First differences, in the order in which a step computes tensors: the first is nearest to the cause."""
    exact = reference.exact
    # A pipeline stage does not hold everything; a single process, which has outputs, does.
    kept = {name: value for name, value in exact.kept.items() if trace.outputs or name in trace.kept}
    at_first = (
        bounds.first_of_start(trace.start, exact.start)
        or bounds.first_of_start(trace.kept, kept)
        or (bounds.first_output(trace, reference) if trace.outputs else None)
        or bounds.first_gradient(trace, reference)
        or bounds.first_state(trace, reference, at_end=False)
    )
    at_end = None if at_first else bounds.first_state(trace, reference, at_end=True)
    step, copy = next(iter(trace.copies.items()), (0, None))
    return [copy, at_first, at_end] if step == 0 else [at_first, copy, at_end]


def judge_loss(text: str, trace: Evidence, plain: Evidence, reference: Reference) -> Verdict:
    """Compare only losses: our bf16 and autocast round at different places, so nothing else can be equal."""
    allowed = bounds.losses_of(trace, reference).bounds
    losses = bounds.Numbers("loss", trace.losses, plain.losses, allowed)
    difference = losses.first_difference()
    return Verdict(
        strategy=text,
        reference=f"plain PyTorch under autocast to {WORDS[DTYPES[reference.precision]]}, losses only",
        status=DIFFERS if difference else EQUAL,
        equal=difference is None,
        loss_max_rel=max(losses.distances),
        first_difference=difference,
        precision=reference.precision,
        bounds={"loss_rel": max(allowed)},
    )


def without_verdict(strategy: str, status: str, reason: str) -> Verdict:
    """The verdict of a strategy that was refused, or whose ranks failed."""
    return Verdict(strategy=strategy, reference=None, status=status, equal=False, first_difference=reason)
