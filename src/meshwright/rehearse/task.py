"""What a rehearsal is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.jobs.load import load_job

STEPS = 3
"""Timed steps. Their median is reported, and the quickest one chooses between strategies."""


@dataclass(frozen=True, kw_only=True)
class RehearsalTask:
    """One rank of a fake world. It is pickled for the process that rehearses it."""

    job: str
    """As written on the command line: a job itself cannot be pickled."""
    facts: ModelFacts
    strategy: Strategy
    """Resolved for the world."""
    world: int
    rank: int = 0
    device: str = "cpu"
    global_batch: int | None = None
    """None: the job's."""
    limit: int | None = None
    """Bytes that the rank may hold; None: what the device has."""
    steps: int = STEPS

    def load(self) -> Job:
        job = load_job(self.job)
        return job if self.global_batch is None else replace(job, global_batch=self.global_batch)
