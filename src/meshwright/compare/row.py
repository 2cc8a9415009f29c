"""Turn the measurements of a strategy's ranks into its row: medians, shares, memory, bubble, equality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from meshwright.compare.rank import CHECKED
from meshwright.compare.start import OK, LaunchOutcome
from meshwright.compare.timeline import measured_timeline
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.units import mib
from meshwright.verify.bounds import LOSS_BOUND

COMPUTE, EXPOSED, OTHER = "compute", "exposed communication", "other"
"""What a measured step spends its time on."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What all rows are computed with."""

    facts: ModelFacts
    global_batch: int
    references: dict[str, list[float]]
    """Losses of the single processes, by strategy; a reference that failed is left out."""


NOT_RUN = LaunchOutcome(status="not run", reason="The comparison was interrupted before its turn.")


def make_row(
    text: str, strategy: Strategy, outcomes: Sequence[LaunchOutcome], reference: str, basis: Basis
) -> dict[str, Any]:
    """One strategy's row; if any round failed, it has a status, a reason and no figures."""
    wrong = next((outcome for outcome in outcomes or [NOT_RUN] if outcome.status != OK), None)
    rounds = [outcome.measured for outcome in outcomes if outcome.measured is not None]
    if wrong is not None:
        return empty_row(text, wrong.status, wrong.reason, strategy=str(strategy), rounds=len(rounds))
    row = empty_row(text, OK, "", strategy=str(strategy), rounds=len(rounds))
    return {
        **row,
        **_speed(rounds, basis),
        **_memory(rounds),
        **_profile(rounds),
        **_pipeline(strategy, rounds),
        **_losses(strategy, rounds[0]["losses"], reference, basis),
        "ranks": [_rank(rank) for rank in rounds[0]["ranks"]],
    }


def empty_row(text: str, status: str, reason: str, *, strategy: str | None = None, rounds: int = 0) -> dict[str, Any]:
    """A row with all fields but no figures."""
    figures = (
        *("step_ms", "step_ms_low", "step_ms_high", "samples_per_s", "tokens_per_s", "against_best"),
        *("peak_mib", "process_mib", "comm_share", "comm_exposed", "bubble"),
        *("loss_equal", "loss_max_rel", "reference", "timeline", "forecast", "forecast_timeline"),
    )
    lists = ("round_ms", "peak_mib_ranks", "losses", "ranks")
    return {
        **{"strategy": text, "resolved": strategy, "status": status, "reason": reason, "rounds": rounds},
        **dict.fromkeys(figures),
        **{name: [] for name in lists},
        **{"memory": {}, "time": {}},
    }


def step_seconds(measured: dict[str, Any]) -> list[float]:
    """Seconds of each timed step, from the first rank's start to the last rank's end."""
    by_step = zip(*(rank["steps"] for rank in measured["ranks"]), strict=True)
    return [max(end for _, _, end, _ in ranks) - min(start for start, *_ in ranks) for ranks in by_step]


def _speed(rounds: Sequence[dict[str, Any]], basis: Basis) -> dict[str, Any]:
    each = [step_seconds(measured) for measured in rounds]
    steps = [seconds for one in each for seconds in one]
    middle, tokens = median(steps), basis.facts.weight_per_sample
    low, _, high = quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else (middle,) * 3
    return {
        "step_ms": 1e3 * middle,
        "step_ms_low": 1e3 * low,
        "step_ms_high": 1e3 * high,
        "round_ms": [1e3 * median(one) for one in each],
        "samples_per_s": basis.global_batch / middle,
        "tokens_per_s": basis.global_batch * tokens / middle if tokens and tokens > 1 else None,
    }


def _memory(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Memory of the rank with the highest peak over all rounds."""
    ranks = [rank for measured in rounds for rank in measured["ranks"]]
    fullest = max(ranks, key=_peak)
    by_rank = zip(*(measured["ranks"] for measured in rounds), strict=True)
    return {
        "peak_mib": mib(_peak(fullest)),
        "peak_mib_ranks": [mib(max(_peak(rank) for rank in same)) for same in by_rank],
        "process_mib": mib(fullest["process"]) if fullest["process"] else None,
        "memory": {cause: mib(size) for cause, size in fullest["memory"].items()},
    }


def _peak(rank: dict[str, Any]) -> int:
    return sum(rank["memory"].values())


def _profile(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the profiled step, averaged over ranks, and the milliseconds of the median step that they amount to."""
    profiles = [rank["profile"] for rank in rounds[0]["ranks"] if rank["profile"] is not None]
    if not profiles:
        return {}
    shares = {name: mean(profile["shares"][name] for profile in profiles) for name in profiles[0]["shares"]}
    step = 1e3 * median(seconds for measured in rounds for seconds in step_seconds(measured))
    compute, exposed = step * shares["compute"], step * shares["exposed"]
    return {
        "comm_share": shares["communication"],
        "comm_exposed": shares["exposed"],
        "time": {COMPUTE: compute, EXPOSED: exposed, OTHER: max(0.0, step - compute - exposed)},
    }


def _pipeline(strategy: Strategy, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The idle share of a pipeline's ranks between the first start and the last end, and the timeline of one step."""
    bubbles = [share for measured in rounds for share in _bubbles(measured)]
    if not bubbles:
        return {}
    timeline = measured_timeline(strategy, rounds[0]["ranks"], step_seconds(rounds[0]))
    return {"bubble": median(bubbles), "timeline": timeline.to_json()}


def _bubbles(measured: dict[str, Any]) -> list[float]:
    shares = []
    for ranks in zip(*(rank["steps"] for rank in measured["ranks"]), strict=True):
        spans = [(start, end) for *_, actions in ranks for _, start, end in actions]
        if spans:
            length = max(end for _, end in spans) - min(start for start, _ in spans)
            shares.append(1 - sum(end - start for start, end in spans) / (length * len(ranks)))
    return shares


def _losses(strategy: Strategy, losses: list[float], reference: str, basis: Basis) -> dict[str, Any]:
    """Whether the checked losses equal those of one process, within `verify`'s bound for losses."""
    shown = [loss if math.isfinite(loss) else None for loss in losses]
    expected = basis.references.get(reference, [])[:CHECKED]
    found = {"losses": shown, "reference": reference}
    if not expected:
        return found
    off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected, strict=False))
    if not math.isfinite(off):
        return {**found, "loss_equal": False}
    return {**found, "loss_equal": off <= LOSS_BOUND[strategy.precision], "loss_max_rel": off}


def _rank(rank: dict[str, Any]) -> dict[str, Any]:
    """A rank's place on the mesh, and its memory in MiB."""
    return {**rank["place"], "memory": {cause: mib(size) for cause, size in rank["memory"].items()}}
