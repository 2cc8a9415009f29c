"""The best strategies over a swept quantity, and where one overtakes another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from meshwright.facts.plan import Plan, Refusal, show_plan
from meshwright.units import GIB


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of the swept quantity."""

    value: float
    cluster: str
    devices: int
    global_batch: int
    room: float
    """Bytes of a device that are available for tensors."""
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """The best plan of each kind that fits, fastest first."""
    best: str | None = None
    """The kind of the recommended plan; None if nothing fits."""
    refused: tuple[Refusal, ...] = ()
    """Named strategies that do not run or fit here."""
    candidates: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "cluster": self.cluster,
            "devices": self.devices,
            "global_batch": self.global_batch,
            "room_gib": self.room / GIB,
            "best": None if self.best is None else str(self.plans[self.best].strategy),
            "best_kind": self.best,
            "kinds": [{"kind": kind, **_with_totals(plan, self.devices)} for kind, plan in self.plans.items()],
            "refused": [asdict(refusal) for refusal in self.refused],
            "candidates": self.candidates,
        }


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """From `value` on, one kind of strategy is faster than another."""

    value: float
    kind: str
    strategy: str
    over: str
    """The kind that was faster before."""
    over_strategy: str
    """Its strategy at `value`; before it, if it no longer fits."""
    gain: float | None
    """Share by which the step is shorter; None if the other kind no longer fits."""
    why: Literal["faster", "fits"]
    """Whether `kind` became faster, or only it still fits."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The result of `plan --sweep`."""

    job: str
    cluster: str
    quantity: str
    unit: str
    points: tuple[Point, ...]
    crossings: tuple[Crossing, ...]
    seconds: float = 0.0
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document that `plan --sweep --json` prints."""
        return {
            "job": self.job,
            "cluster": self.cluster,
            "quantity": self.quantity,
            "unit": self.unit,
            "points": [point.to_json() for point in self.points],
            "crossings": [asdict(crossing) for crossing in self.crossings],
            "seconds": self.seconds,
            "advice": list(self.advice),
        }


def _with_totals(plan: Plan, devices: int) -> dict[str, Any]:
    """A plan with its speed both in total and for each device."""
    each = plan.speed.tokens_per_s_per_device
    return {
        **show_plan(plan),
        "samples_per_s_per_device": plan.speed.samples_per_s / devices,
        "tokens_per_s": each and each * devices,
    }
