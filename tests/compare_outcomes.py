"""Made-up outcomes of `compare`'s ranks, and the document of a comparison that nobody ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.compare.compare import Compared, compare
from meshwright.compare.start import OK, LaunchOutcome
from meshwright.runtime.request import CompareRequest, CompareTask
from meshwright.units import MIB

JOB = f"{Path(__file__).with_name('compare_jobs.py')}:sound"
SLOW = {"zero2": 0.2, "fsdp": 0.4}
"""Seconds of a step by strategy; 0.1 of any other."""


def rank(number: int, *, seconds: float, steps: int, stages: int = 0) -> dict[str, Any]:
    """What a rank tells. Under a pipeline it computes for a quarter of the step, at a time of its own."""
    told = []
    for step in range(steps):
        begun = 1000.0 + step
        quarter = seconds / 4
        first = begun + number * quarter
        actions = [(f"{number}F0", first, first + quarter / 2), (f"{number}B0", first + quarter / 2, first + quarter)]
        told.append((begun, begun + 0.8 * seconds, begun + seconds, actions if stages else []))
    return {
        "place": {
            **{"pipeline": number if stages else 0, "data": 0 if stages else number, "tensor": 0},
            "sizes": {"pipeline": stages or 1, "data": 1 if stages else 2, "tensor": 1},
            "stages": [number] if stages else [],
        },
        "memory": {"parameters": MIB, "gradients": MIB, "optimizer": 2 * MIB, "rest": (4 + number) * MIB},
        "process": 300 * MIB,
        "steps": told,
        "profile": {
            "seconds": seconds,
            "shares": {"compute": 0.5, "communication": 0.4, "exposed": 0.3},
            "compute": [(0.0, 0.5 * seconds)],
            "communication": [(0.4 * seconds, 0.8 * seconds)],
        },
    }


class Starts:
    """Stands in for the start of ranks; remembers what it was asked for."""

    def __init__(self, **outcomes: LaunchOutcome) -> None:
        self.asked: list[str] = []
        self._outcomes = outcomes
        self.losses = {"zero2": [1.0, 0.9 * (1 + 1e-3), 0.8]}

    def __call__(self, task: CompareTask, ranks: int, *, timeout: float) -> LaunchOutcome:
        text = str(task.strategy)
        name = text.split("=")[0]
        self.asked.append(text)
        if name in self._outcomes:
            return self._outcomes[name]
        stages = ranks if name == "pp" else 0
        seconds = SLOW.get(name, 0.1)
        told = [rank(number, seconds=seconds, steps=task.request.steps, stages=stages) for number in range(ranks)]
        losses = self.losses.get(name, [1.0, 0.9, 0.8])
        return LaunchOutcome(status=OK, measured={"strategy": text, "losses": losses, "ranks": told})


def made_up(
    *strategies: str, starts: Starts | None = None, rounds: int = 2, lines: list[str] | None = None
) -> Compared:
    """A comparison of which only the ranks are made up."""
    request = CompareRequest(job=JOB, ranks=2, strategies=strategies, steps=3, rounds=rounds)
    told: list[str] = [] if lines is None else lines
    return compare(request, tell=told.append, start=starts or Starts())
