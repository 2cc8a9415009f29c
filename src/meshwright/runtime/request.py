"""What a command is asked for, and the task that it hands to its ranks.

A request holds the user's words. A task is a request that was checked, with what the checks found. Tasks reach the
ranks as they are: the launcher pickles them into a folder that only this user can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.launch.preemption import GRACE
from meshwright.runtime.profile_train import ProfileOptions


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What `meshwright train` is asked for."""

    job: str
    strategy: Strategy
    ranks: int | None = None
    steps: int = 100
    """Of the whole run, resumed ones included."""
    out: Path | None = None
    resume: bool = False
    save_every: int = 0
    """0: save only at the end."""
    keep: int = 3
    """0: keep all checkpoints."""
    keep_every: int = 0
    max_restarts: int | None = None
    """None: a few where the run saves itself."""
    grace: float = GRACE
    patience: float = 120.0
    seed: int | None = None
    max_norm: float | None = None
    """None: the job's own."""
    workers: int = 0
    device: str | None = None
    tensorboard: bool = False
    log_to: tuple[str, ...] = ()
    profile: ProfileOptions | None = None
    deepspeed_config: Mapping[str, Any] | None = None

    def clip(self, job: Job) -> Job:
        """The job with the norm that was asked for."""
        return job if self.max_norm is None else replace(job, max_norm=self.max_norm)


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    request: TrainRequest
    """With the ranks and the device that were chosen."""
    facts: ModelFacts


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """What `meshwright verify` is asked for."""

    job: str
    strategies: tuple[str, ...] = ()
    """As they were written; empty: all usual ones that fit."""
    ranks: int | None = None
    steps: int = 3
    seed: int = 0
    timeout: float = 600.0
    """Seconds that a rank waits for another."""
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    request: VerifyRequest
    facts: ModelFacts
    device: str
    references: Path
    """The folder in which another process has put what to compare with."""
    strategies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReferenceTask:
    """For the process that makes the references."""

    request: VerifyRequest
    facts: ModelFacts
    device: str
    wanted: tuple[Strategy, ...]


@dataclass(frozen=True, kw_only=True)
class CauseTask:
    """For the process that looks for a cause of differences in the job itself."""

    request: VerifyRequest
    device: str


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What `meshwright compare` is asked for."""

    job: str
    ranks: int
    strategies: tuple[str, ...] = ()
    """As they were written; empty: all plain ones that are legal."""
    steps: int = 10
    """That are timed in each round."""
    rounds: int = 2
    seed: int = 0
    timeout: float = 300.0
    """Seconds for one start of a strategy's ranks."""
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompareTask:
    """One strategy of a comparison."""

    request: CompareRequest
    facts: ModelFacts
    device: str
    strategy: Strategy
    profile: bool
    """Whether one more step is profiled."""


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What `meshwright probe` is asked for; its ranks need no more than that."""

    ranks: int | None = None
    device: str | None = None
    out: Path | None = None
