"""A strategy with its forecast and the reasons for it: where the planner and the runtime meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.facts.forecast import Forecast
from meshwright.facts.strategy import Strategy

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a step's time comes to."""

    samples_per_s: float = 0.0
    tokens_per_s_per_device: float | None = None
    """None where a sample's tokens cannot be told from its loss."""
    mfu: float = 0.0
    """The share of the devices' peak that the model's own forward and backward pass come to."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One candidate that the planner has thought through."""

    strategy: Strategy
    """How the job would lie over the cluster."""
    forecast: Forecast
    """What one step would take on the fullest rank."""
    fits: bool
    """Whether the peak stays within the device's memory."""
    why: tuple[str, ...] = ()
    """Sentences for the user: why it won, lost, or does not fit."""
    speed: Speed = field(default_factory=Speed)
    error_bar: Mapping[str, float] = field(default_factory=dict)
    """How far memory and time may be off, as shares."""
    grade: str = "account"
    """"account" where it is a closed form, "trace" where the step was run on fake tensors."""
    stages: tuple[Forecast, ...] = ()
    """Memory of one rank of each pipeline stage, first to last; empty without a pipeline."""
    host_gib: float = 0.0
    """What leaves the device for its host's memory."""
    saving_gib: float = 0.0
    """What a save in the background holds of host memory meanwhile: one copy of what the rank writes."""

    @property
    def peak(self) -> int:
        """Bytes allocated."""
        return self.forecast.peak - self.forecast.memory.get("allocator", 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.to_json(),
            "forecast": self.forecast.to_json(),
            "fits": self.fits,
            "why": list(self.why),
            "speed": asdict(self.speed),
            "error_bar": dict(self.error_bar),
            "grade": self.grade,
            "stages": [stage.to_json() for stage in self.stages],
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
            grade=value.get("grade", "account"),
            stages=tuple(Forecast.from_json(stage) for stage in value.get("stages", ())),
            host_gib=value.get("host_gib", 0.0),
            saving_gib=value.get("saving_gib", 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A candidate that cannot be, or does not fit, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ForeignChoice:
    """Somebody's own choice, read from another framework's config, held against the plans."""

    file: str
    origin: str
    """Whose config it is."""
    strategy: str
    """As it would lie here; as the file has it where it cannot."""
    gain: str
    """What the first plan gains over it, in one sentence."""
    rank: int | None = None
    """Its place among the plans, from 1; None where it does not fit or is refused."""
    plan: Plan | None = None
    """Its forecast; None where it is refused."""
    reason: str = ""
    """Why it does not fit or is refused; empty where it fits."""
    notes: tuple[str, ...] = ()
    """What was taken otherwise than the file has it, or left out."""

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
            "plan": None if self.plan is None else _show(self.plan),
        }


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What `plan` found: plans that fit, fastest first; the rest with their reasons."""

    job: str
    cluster: str
    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...]
    candidates: int
    """How many were considered."""
    seconds: float = 0.0
    advice: tuple[str, ...] = ()
    """What to change where nothing fits; else what is worth knowing."""
    against: ForeignChoice | None = None
    """A choice that was not ours, where one was asked for."""

    def to_json(self) -> dict[str, Any]:
        """The document that `plan --json` prints."""
        return {
            "job": self.job,
            "cluster": self.cluster,
            "plans": [_show(plan) for plan in self.plans],
            "refused": [asdict(refusal) for refusal in self.refused],
            "candidates": self.candidates,
            "seconds": self.seconds,
            "advice": list(self.advice),
            "against": None if self.against is None else self.against.to_json(),
        }


def _show(plan: Plan) -> dict[str, Any]:
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
        "why": list(plan.why),
        "grade": plan.grade,
        "stages": [{"peak_gib": stage.peak / GIB} for stage in plan.stages],
        "host_gib": plan.host_gib,
        "saving_gib": plan.saving_gib,
    }
