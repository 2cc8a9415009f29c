"""The training loop: takes steps, writes records and saves checkpoints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.assemble.step import StepResult
from meshwright.errors import NonFiniteLoss
from meshwright.launch.heartbeat import SAVING, own_heartbeat
from meshwright.launch.preemption import Preemption
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.measure import peak_bytes
from meshwright.runtime.profile_train import ProfileOptions, TrainProfiler
from meshwright.runtime.run import Run
from meshwright.runtime.run_records import RunRecorder, write_event
from meshwright.runtime.sinks import open_services

WARMUP = 2  # first steps, left out of the speed because they fill allocators and caches


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Results of a run; the same on every rank."""

    strategy: str
    ranks: int
    device: str
    steps: int
    """Of the whole run, including those before a resume."""
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
    """The signal that stopped the run before its last step."""
    saved: int | None = None
    """The step of the last checkpoint."""
    failed_saves: int = 0
    out: str | None = None


class StepWatch:
    """Turns step results into records; on a GPU one step late, because reading a number blocks until it is computed."""

    def __init__(self, run: Run, recorder: RunRecorder) -> None:
        self._run, self._recorder = run, recorder
        self._waiting: StepResult | None = None
        self._clock = time.perf_counter()
        self.losses: list[float] = []
        self.times: list[float] = []
        self.samples = 0
        self.stop = False
        """Whether a result read so far says that some rank got a signal to stop; the same on all ranks."""

    def saw(self, result: StepResult) -> None:
        """Add a result, and record those that are computed."""
        if self._run.world.device.type != "cuda":
            self._write(result)
            return
        self.catch_up()
        self._waiting = result

    def catch_up(self) -> None:
        """Record all results added so far."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._write(waiting)

    def _write(self, result: StepResult) -> None:
        loss, now = result.loss, time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.losses.append(loss)
        self.times.append(seconds)
        self.samples += result.samples
        self.stop = self.stop or result.stop
        refuse_non_finite(self._run, result)
        self._recorder.write(
            {
                "step": result.step,
                "loss": loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "step_ms": seconds * 1e3,
                "samples_per_s": result.samples / seconds,
                "memory_mib": peak_bytes(self._run.world.device) / 2**20,
                "samples": result.samples,
                "skipped": result.skipped,
            }
        )


def train(
    run: Run,
    *,
    steps: int,
    out: Path | None = None,
    checkpoints: Checkpoints | None = None,
    preemption: Preemption | None = None,
    tensorboard: bool = False,
    log_to: Sequence[str] = (),
    profile: ProfileOptions | None = None,
    progress: bool = True,
) -> Summary:
    """Train until the run has taken `steps` optimizer steps. All ranks call it and get the same summary."""
    start = time.perf_counter()
    begun_at = run.trainer.steps
    if checkpoints is not None:
        checkpoints.prepare()
    folder = out if run.is_main else None
    services = open_services(log_to, folder, _about(run)) if folder is not None else ()
    with (
        RunRecorder(folder, tensorboard=tensorboard, after=begun_at, services=services) as recorder,
        _bar(run, progress) as bar,
        closing(TrainProfiler(profile, out, rank=run.world.rank, device=run.world.device)) as profiler,
    ):
        watch = StepWatch(run, recorder)
        try:
            _loop(run, watch, bar, profiler, steps=steps, checkpoints=checkpoints, preemption=preemption)
        except NonFiniteLoss:
            if checkpoints is not None:
                checkpoints.wait()  # all ranks get here, and the last good state may still be written
            raise
    stopped = _stop_signal(run, preemption) if watch.stop and run.trainer.steps < steps else None
    if checkpoints is not None:
        with own_heartbeat().doing(SAVING):
            checkpoints.finish()
    if out is not None and stopped and run.is_main:
        write_event(out, "asked to stop", signal=stopped, step=run.trainer.steps)
    seconds = time.perf_counter() - start
    return _summarise(run, watch, begun_at, checkpoints, seconds=seconds, stopped=stopped, out=out)


def _loop(
    run: Run,
    watch: StepWatch,
    bar: Progress,
    profiler: TrainProfiler,
    *,
    steps: int,
    checkpoints: Checkpoints | None,
    preemption: Preemption | None,
) -> None:
    heartbeat = own_heartbeat()
    begins = "compiling" if run.strategy.compile else ""
    task = bar.add_task(str(run.strategy), total=steps, completed=run.trainer.steps, loss=begins)
    for batch in run.batches(steps=max(0, steps - run.trainer.steps)):
        run.trainer.wish_to_stop = preemption is not None and preemption.asked is not None
        with profiler.around(run.trainer.steps + 1):
            watch.saw(run.step(batch))
        heartbeat.step(run.trainer.steps)
        if checkpoints is not None and checkpoints.is_due():
            watch.catch_up()  # a state with a NaN loss must not become the last checkpoint
            with heartbeat.doing(SAVING):
                checkpoints.save()
        bar.update(task, advance=1, loss=f"loss {watch.losses[-1]:.4f}" if watch.losses else begins)
        if watch.stop:
            break
    watch.catch_up()
    if watch.losses:
        bar.update(task, loss=f"loss {watch.losses[-1]:.4f}")


def _about(run: Run) -> Mapping[str, Any]:
    """The run's parameters, for tools that list many runs."""
    about = {"strategy": str(run.strategy), "ranks": run.world.ranks, "device": run.world.device.type}
    return {**about, "global_batch": run.trainer.job.global_batch, "seed": run.trainer.seed}


def refuse_non_finite(run: Run, result: StepResult) -> None:
    """Stop at a loss that is not finite. All ranks see the same loss, so they stop together."""
    if math.isfinite(result.loss):
        return
    parts = run.world.gather(float(result.totals.local))
    culprits = [rank for rank, value in enumerate(parts) if not math.isfinite(value)] or [0]
    raise NonFiniteLoss(
        f"The loss became {result.loss} at step {result.step}, first on rank {culprits[0]}; "
        "lower the learning rate, set max_norm, or check that rank's batch."
    )


def _stop_signal(run: Run, preemption: Preemption | None) -> str:
    """The first signal that any rank got."""
    asked = run.world.gather(preemption.asked if preemption is not None else None)
    return next((name for name in asked if name is not None), "a signal")


def _summarise(
    run: Run,
    watch: StepWatch,
    begun_at: int,
    checkpoints: Checkpoints | None,
    *,
    seconds: float,
    stopped: str | None,
    out: Path | None,
) -> Summary:
    first, counted = watch.times[:WARMUP], sorted(watch.times[WARMUP:] or watch.times)
    step_seconds = counted[len(counted) // 2] if counted else None
    return Summary(
        strategy=str(run.strategy),
        ranks=run.world.ranks,
        device=str(run.world.device.type),
        steps=run.trainer.steps,
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
        saved=checkpoints.saved if checkpoints is not None else None,
        failed_saves=checkpoints.failures if checkpoints is not None else 0,
        out=None if out is None else str(out),
    )


def _bar(run: Run, wanted: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # If stderr is no terminal, rich draws the bar once, at the end.
    return Progress(*columns, console=Console(file=sys.stderr), disable=not (wanted and run.is_main))
