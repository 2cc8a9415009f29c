"""Plans: strategies with their forecasts and reasons, which the planner makes and other layers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.facts import html
from meshwright.facts.finding import Finding
from meshwright.facts.forecast import Forecast
from meshwright.facts.strategy import Strategy
from meshwright.units import GIB, show_seconds


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Throughput that follows from a step's time."""

    samples_per_s: float = 0.0
    tokens_per_s_per_device: float | None = None
    """None if the tokens of a sample are unknown."""
    mfu: float = 0.0
    """Model FLOPs utilization: FLOPs of forward and backward, without recomputation, as a share of the peak."""


MEASURED_KERNELS = "measured kernels"
"""The grade of a time whose kernels were measured on the device."""
HEADS = ("strategy", "step", "time by cause", "memory", "memory by cause")
"""Columns of plans in notebooks."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One strategy with its forecast."""

    strategy: Strategy
    forecast: Forecast
    """Memory of the fullest rank, and time of a step."""
    fits: bool
    """Whether the peak fits into the device's memory."""
    why: tuple[str, ...] = ()
    """Sentences that explain its rank, or why it does not fit."""
    speed: Speed = field(default_factory=Speed)
    error_bar: Mapping[str, float] = field(default_factory=dict)
    """Expected errors of memory and time, as shares: three in four measured runs of its kind were within them."""
    untested: tuple[str, ...] = ()
    """Sentences that say in what the forecast is outside of all runs that forecasts were compared with."""
    grade: str = "account"
    """How memory was forecast: "account" in closed form, or "trace" by a step on fake tensors."""
    kernels: Mapping[str, float] = field(default_factory=dict)
    """Shares of the kernels' time that are measured ("exact"), "interpolated" from measured ones, and from the
    "catalogue"; empty if no measured kernels were given, so that all are the catalogue's."""
    is_open: bool = False
    """Whether traces of fewer blocks leave open if it fits, so that only one of the whole model can tell."""
    stages: tuple[Forecast, ...] = ()
    """Memory of one rank of each pipeline stage, first to last; empty without a pipeline."""
    worst: Forecast | None = None
    """Memory and time if all tokens choose experts of one rank; None without experts, or if it was not asked for."""
    host_gib: float = 0.0
    """Host memory per node for offloaded state."""
    saving_gib: float = 0.0
    """Host memory of a background save: one copy of what the rank writes."""

    @property
    def peak(self) -> int:
        """Bytes allocated, without the allocator's fragmentation."""
        return self.forecast.peak - self.forecast.memory.get("allocator", 0)

    def cells(self) -> tuple[str, ...]:
        """HTML for `HEADS`."""
        memory = {cause: float(size) for cause, size in self.forecast.memory.items()}
        return (
            html.terms(str(self.strategy)),
            show_seconds(self.forecast.step),
            html.bar(self.forecast.time),
            f"{self.forecast.peak / GIB:.1f} GiB",
            html.bar(memory),
        )

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html.block([html.table(HEADS, [self.cells()]), html.paragraph(" ".join(self.why))])

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.to_json(),
            "forecast": self.forecast.to_json(),
            "fits": self.fits,
            "why": list(self.why),
            "speed": asdict(self.speed),
            "error_bar": dict(self.error_bar),
            "untested": list(self.untested),
            "grade": self.grade,
            "kernels": dict(self.kernels),
            "is_open": self.is_open,
            "stages": [stage.to_json() for stage in self.stages],
            "worst": self.worst and self.worst.to_json(),
            "host_gib": self.host_gib,
            "saving_gib": self.saving_gib,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        return cls(
            strategy=Strategy.from_json(value["strategy"]),
            forecast=Forecast.from_json(value["forecast"]),
            fits=value["fits"],
            why=tuple(value["why"]),
            speed=Speed(**value.get("speed", {})),
            error_bar=value.get("error_bar", {}),
            untested=tuple(value.get("untested", ())),
            grade=value.get("grade", "account"),
            kernels=value.get("kernels", {}),
            is_open=value.get("is_open", False),
            stages=tuple(Forecast.from_json(stage) for stage in value.get("stages", ())),
            worst=Forecast.from_json(value["worst"]) if value.get("worst") else None,
            host_gib=value.get("host_gib", 0.0),
            saving_gib=value.get("saving_gib", 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A candidate that cannot run or does not fit, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ForeignChoice:
    """The user's config of another framework, compared with the plans."""

    file: str
    origin: str
    """The framework that the config is for."""
    strategy: str
    """Resolved for the cluster, or as in the file if that is refused."""
    gain: str
    """What the first plan gains over it, in one sentence."""
    rank: int | None = None
    """Its rank among the plans, from 1; None if it does not fit or is refused."""
    plan: Plan | None = None
    """Its forecast; None if it is refused."""
    reason: str = ""
    """Why it does not fit or is refused; empty if it fits."""
    notes: tuple[str, ...] = ()
    """Settings that were changed or left out."""

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "origin": self.origin,
            "strategy": self.strategy,
            "rank": self.rank,
            "fits": self.rank is not None,
            "reason": self.reason,
            "gain": self.gain,
            "notes": list(self.notes),
            "plan": None if self.plan is None else show_plan(self.plan),
        }


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of `plan`: plans that fit, fastest first, and refusals with their reasons."""

    job: str
    cluster: str
    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]
    candidates: int
    """Number of strategies that were considered."""
    seconds: float = 0.0
    advice: tuple[str, ...] = ()
    """What to change if nothing fits, and other remarks."""
    against: ForeignChoice | None = None
    """The user's own config, if one was given."""
    findings: tuple[Finding, ...] = ()
    """What a preflight of the job under the first plan found."""

    def _repr_html_(self) -> str:
        """For notebooks: the recommendation, and the plans in order."""
        parts = [html.paragraph(f"{self.job} on {self.cluster}")]
        if self.plans:
            parts.append(html.paragraph(f"Recommended: {self.plans[0].strategy}", strong=True))
            parts.append(html.paragraph(" ".join(self.plans[0].why)))
            parts.append(html.table(HEADS, [plan.cells() for plan in self.plans]))
        parts += [html.paragraph(sentence) for sentence in self.advice]
        parts.append(html.paragraph(f"{self.candidates:,} candidates, {len(self.refused):,} refused or too large"))
        return html.block(parts)

    def to_json(self) -> dict[str, Any]:
        """The document that `plan --json` prints."""
        return {
            "job": self.job,
            "cluster": self.cluster,
            "plans": [show_plan(plan) for plan in self.plans],
            "refused": [asdict(refusal) for refusal in self.refused],
            "candidates": self.candidates,
            "seconds": self.seconds,
            "advice": list(self.advice),
            "against": None if self.against is None else self.against.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


def show_plan(plan: Plan) -> dict[str, Any]:
    """A plan as `plan --json` prints it."""
    return {
        "strategy": str(plan.strategy),
        "fits": plan.fits,
        "peak_gib": plan.peak / GIB,
        "reserved_gib": plan.forecast.peak / GIB,
        "memory": {cause: size / GIB for cause, size in plan.forecast.memory.items()},
        "step_ms": plan.forecast.step * 1e3,
        "time": {cause: seconds * 1e3 for cause, seconds in plan.forecast.time.items()},
        "samples_per_s": plan.speed.samples_per_s,
        "tokens_per_s_per_device": plan.speed.tokens_per_s_per_device,
        "mfu": plan.speed.mfu,
        "error_bar": dict(plan.error_bar),
        "untested": list(plan.untested),
        "why": list(plan.why),
        "grade": plan.grade,
        "time_grade": MEASURED_KERNELS if plan.kernels else "catalogue",
        "kernels": dict(plan.kernels),
        "stages": [{"peak_gib": stage.peak / GIB} for stage in plan.stages],
        "host_gib": plan.host_gib,
        "saving_gib": plan.saving_gib,
        **_worst_routing(plan),
    }


def _worst_routing(plan: Plan) -> dict[str, Any]:
    if plan.worst is None:
        return {}
    return {"worst_routing": {"step_ms": plan.worst.step * 1e3, "reserved_gib": plan.worst.peak / GIB}}
