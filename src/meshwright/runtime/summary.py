"""The results of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.launch.heartbeat import own_heartbeat
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.evaluator import Evaluator
from meshwright.runtime.measure import peak_bytes
from meshwright.runtime.run import Run
from meshwright.runtime.step_watch import StepWatch
from meshwright.runtime.waits import WaitWatch

WARMUP = 2  # first steps, left out of the speed because they fill allocators and caches


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Results of a run; the same on every rank."""

    strategy: str
    ranks: int
    device: str
    global_batch: int
    steps: int
    """Of the whole run, including those before a resume."""
    epochs: int
    """Completed, like steps."""
    resumed_at: int | None
    """The step that the run resumed from; None if it started at step 0."""
    samples: int
    """Since the resume, like all fields below."""
    seconds: float
    start_up_s: float | None
    """How much longer the first steps took than later ones: compiling, recording programs, filling caches."""
    step_ms: float | None
    """Median."""
    samples_per_s: float | None
    first_loss: float | None
    last_loss: float | None
    peak_bytes: list[int]
    """Per rank."""
    stopped: str | None = None
    """The signal or the callback that stopped the run before its last step."""
    evaluation: dict[str, Any] | None = None
    """The last evaluation: its step, the loss and the metrics."""
    early_stop: dict[str, Any] | None = None
    """The metric, its best value and step, if the job's rule ended the run."""
    saved: int | None = None
    """The step of the last checkpoint."""
    failed_saves: int = 0
    out: str | None = None
    limit: dict[str, Any] | None = None
    """What limited the run: cause, share and seconds of a step, rank, sentence. None after too few steps."""


def summarise(
    run: Run,
    watch: StepWatch,
    waits: WaitWatch,
    evaluator: Evaluator,
    checkpoints: Checkpoints | None,
    *,
    begun_at: int,
    seconds: float,
    stopped: str | None,
    out: Path | None,
) -> Summary:
    """The summary on every rank; all ranks must call it."""
    first, counted = watch.times[:WARMUP], sorted(watch.times[WARMUP:] or watch.times)
    step_seconds = counted[len(counted) // 2] if counted else None
    measures_peers = run.world.ranks > 1 and own_heartbeat().measures_waiting
    limit = waits.limit(run.world, step_seconds, watch.device_waits, measures_peers=measures_peers)
    return Summary(
        strategy=str(run.strategy),
        ranks=run.world.ranks,
        device=str(run.world.device.type),
        global_batch=run.trainer.job.global_batch,
        steps=run.trainer.steps,
        epochs=run.epoch,
        resumed_at=begun_at or None,
        samples=watch.samples,
        seconds=seconds,
        start_up_s=max(0.0, sum(first) - len(first) * step_seconds)
        if step_seconds and len(watch.times) > WARMUP
        else None,
        step_ms=step_seconds * 1e3 if step_seconds else None,
        samples_per_s=watch.samples / len(watch.times) / step_seconds if step_seconds else None,
        first_loss=watch.losses[0] if watch.losses else None,
        last_loss=watch.losses[-1] if watch.losses else None,
        peak_bytes=run.world.gather(peak_bytes(run.world.device)),
        stopped=stopped,
        evaluation=evaluator.last,
        early_stop=evaluator.stopping.told,
        saved=checkpoints.saved if checkpoints is not None else None,
        failed_saves=checkpoints.failures if checkpoints is not None else 0,
        out=None if out is None else str(out),
        limit=None if limit is None else limit.to_json(),
    )
