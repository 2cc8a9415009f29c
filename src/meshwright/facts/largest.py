"""The largest micro-batch and the largest batch that fit, for each strategy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.facts.plan import Plan, show_plan
from meshwright.units import GIB


@dataclass(frozen=True, kw_only=True)
class Larger:
    """The next larger size, which does not fit."""

    samples: int
    peak_gib: float
    reserved_gib: float


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest number of samples that one rank has in flight."""

    samples: int
    global_batch: int
    """Samples of the step that was forecast."""
    plan: Plan
    """The forecast of that step."""
    larger: Larger | None = None
    """None if even the largest size that is tried fits."""
    returns: int = 0
    """How often the allocator returns memory to the device in a step of this size, which takes time."""

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "global_batch": self.global_batch,
            **show_plan(self.plan),
            "next": None if self.larger is None else asdict(self.larger),
            "returns": self.returns,
        }


@dataclass(frozen=True, kw_only=True)
class LargestSizes:
    """What fits under one strategy."""

    strategy: str
    """Resolved for the cluster, without a micro-batch size; as it was written if it is refused."""
    micro_batch: Limit | None = None
    """The largest `mb=` of a step with several micro-batches."""
    batch: Limit | None = None
    """The largest batch of a step with one micro-batch; None for a pipeline, whose steps always have several."""
    reason: str = ""
    """Why nothing fits or runs; empty if something does."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.micro_batch is not None or self.batch is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "fits": self.fits,
            "micro_batch": self.micro_batch and self.micro_batch.samples,
            "batch": self.batch and self.batch.global_batch,
            "reason": self.reason,
            "notes": list(self.notes),
            "limits": {
                "micro_batch": self.micro_batch and self.micro_batch.to_json(),
                "batch": self.batch and self.batch.to_json(),
            },
        }


@dataclass(frozen=True, kw_only=True)
class LargestReport:
    """The result of `plan --largest`."""

    job: str
    cluster: str
    room: float
    """Bytes that a rank may reserve."""
    results: tuple[LargestSizes, ...]
    seconds: float = 0.0
    advice: tuple[str, ...] = ()
    """What to change if nothing fits, and other remarks."""

    def to_json(self) -> dict[str, Any]:
        """The document that `plan --largest --json` prints."""
        return {
            "job": self.job,
            "cluster": self.cluster,
            "room_gib": self.room / GIB,
            "results": [result.to_json() for result in self.results],
            "seconds": self.seconds,
            "advice": list(self.advice),
        }
