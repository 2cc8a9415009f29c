"""Requests of the commands, and the tasks that commands hand to their ranks.

A request holds the user's arguments. A task is a checked request plus what the checks found. The launcher pickles tasks
for the ranks into a folder that only this user can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import BadInput
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.launch.node_options import NodeOptions
from meshwright.launch.on_ray import RayOptions
from meshwright.launch.preemption import GRACE
from meshwright.runtime.profile_train import ProfileOptions


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """Arguments of `meshwright train`."""

    job: str
    strategy: Strategy
    ranks: int | None = None
    """On this machine; in a task, on all nodes together."""
    steps: int | None = 100
    """Of the whole run, including those before a resume."""
    epochs: int | None = None
    """Of the whole run. With steps, it ends at whichever comes first."""
    eval_every: int | None = None
    """Steps between evaluations. None: the job's."""
    out: Path | None = None
    store: str | None = None
    """URL of object storage that keeps the checkpoints; `out` is then each node's own copy."""
    resume: bool = False
    save_every: int = 0
    """0: save only at the end."""
    keep: int = 3
    """0: keep all checkpoints."""
    keep_every: int = 0
    max_restarts: int | None = None
    """None: a few if the run saves checkpoints."""
    grace: float = GRACE
    patience: float = 120.0
    on_hang: str = "restart"
    """Or "end"."""
    seed: int | None = None
    max_norm: float | None = None
    """None: the job's."""
    workers: int = 0
    device: str | None = None
    tensorboard: bool = False
    log_to: tuple[str, ...] = ()
    profile: ProfileOptions | None = None
    advise: bool | None = None
    """Whether the planner looks for a faster strategy after the run. None: after a run that was long enough."""
    check_finite: bool = False
    """Whether gradients are checked before each update, also on a GPU, which then waits."""
    deepspeed_config: Mapping[str, Any] | None = None
    nodes: NodeOptions | None = None
    """None: this machine alone, or the nodes of another launcher."""
    interface: str | None = None
    ray: RayOptions | None = None
    """Set if Ray starts the ranks."""

    def adjust(self, job: Job) -> Job:
        """The job with this request's `max_norm` and `eval_every`."""
        if self.max_norm is not None:
            job = replace(job, max_norm=self.max_norm)
        if self.eval_every is None:
            return job
        if job.evaluation is None:
            raise BadInput("--eval-every was given, but the job has no evaluation; give it Job(evaluation=...).")
        return replace(job, evaluation=replace(job.evaluation, every=self.eval_every))


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    request: TrainRequest
    """With ranks and device filled in."""
    facts: ModelFacts


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """Arguments of `meshwright verify`."""

    job: str
    strategies: tuple[str, ...] = ()
    """As the user wrote them; empty: all usual ones that fit."""
    ranks: int | None = None
    steps: int = 3
    seed: int = 0
    timeout: float = 600.0
    """Seconds that a rank waits for its peers."""
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    request: VerifyRequest
    facts: ModelFacts
    device: str
    references: Path
    """The folder with the references that another process made."""
    strategies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReferenceTask:
    """Task of the process that makes the references."""

    request: VerifyRequest
    facts: ModelFacts
    device: str
    wanted: tuple[Strategy, ...]


@dataclass(frozen=True, kw_only=True)
class CauseTask:
    """Task of the process that looks for the cause of a difference in the job."""

    request: VerifyRequest
    device: str


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """Arguments of `meshwright compare`."""

    job: str
    ranks: int
    strategies: tuple[str, ...] = ()
    """As the user wrote them; empty: all plain ones that are legal."""
    steps: int = 10
    """Timed steps in each round."""
    rounds: int = 2
    seed: int = 0
    timeout: float = 300.0
    """Seconds that one launch of a strategy's ranks may take."""
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompareTask:
    """Task of the ranks that measure one strategy."""

    request: CompareRequest
    facts: ModelFacts
    device: str
    strategy: Strategy
    profile: bool
    """Whether to profile one more step."""


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Arguments of `meshwright probe`, and the task of its ranks."""

    ranks: int | None = None
    device: str | None = None
    out: Path | None = None
