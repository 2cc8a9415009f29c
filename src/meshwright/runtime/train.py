"""The training loop: takes steps, evaluates, writes records and saves checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.errors import JobError, NonFiniteLoss
from meshwright.launch.heartbeat import SAVING, own_heartbeat
from meshwright.launch.preemption import Preemption
from meshwright.runtime.callbacks import Callbacks
from meshwright.runtime.checkpoints import Checkpoints
from meshwright.runtime.evaluator import Evaluator
from meshwright.runtime.profile_train import ProfileOptions, TrainProfiler
from meshwright.runtime.run import Run
from meshwright.runtime.run_records import RunRecorder, write_event
from meshwright.runtime.sinks import open_services
from meshwright.runtime.step_watch import StepWatch
from meshwright.runtime.summary import WARMUP, Summary, summarise
from meshwright.runtime.waits import WaitWatch


def train(
    run: Run,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    out: Path | None = None,
    checkpoints: Checkpoints | None = None,
    preemption: Preemption | None = None,
    tensorboard: bool = False,
    log_to: Sequence[str] = (),
    profile: ProfileOptions | None = None,
    progress: bool = True,
    check_finite: bool = False,
) -> Summary:
    """Train until the run has taken `steps` optimizer steps or completed `epochs`, whichever comes first.

    All ranks call it and get the same summary. `check_finite` reads each gradient's norm before the update, so that a
    first NaN can be traced to its module; on a CPU that is free and always done.
    """
    run.trainer.holds_back = check_finite or run.world.device.type == "cpu"
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
        callbacks = Callbacks(run)
        if checkpoints is not None:
            checkpoints.when_saved = callbacks.saved
        watch, waits = StepWatch(run, recorder, callbacks.stepped), WaitWatch(WARMUP)
        evaluator = Evaluator(run, recorder, callbacks, lambda line: _say(bar, line))
        last = _last_step(run, evaluator, steps=steps, epochs=epochs)
        try:
            _loop(
                *(run, watch, waits, evaluator, callbacks, bar, profiler),
                last=last,
                epochs=epochs,
                checkpoints=checkpoints,
                preemption=preemption,
            )
            run.end_loading()
            asked = callbacks.stop_reason()
        except (NonFiniteLoss, JobError):
            if checkpoints is not None:
                checkpoints.wait()  # all ranks get here, and the last good state may still be written
            raise
        is_early = watch.stop and (last is None or run.trainer.steps < last)
        interrupted = is_early and asked is None
        stopped = _stop_signal(run, preemption) if interrupted else asked if is_early else None
        if not interrupted:
            evaluator.evaluate_at_the_end()
        if checkpoints is not None:
            with own_heartbeat().doing(SAVING):
                checkpoints.finish()
        callbacks.stop_reason()  # the last evaluation and the last save may have failed, too
    if out is not None and interrupted and run.is_main:
        write_event(out, "asked to stop", signal=stopped, step=run.trainer.steps)
    if out is not None and evaluator.stopping.is_over and run.is_main:
        write_event(out, "stopped early", step=run.trainer.steps, **(evaluator.stopping.told or {}))
    seconds = time.perf_counter() - start
    return summarise(
        *(run, watch, waits, evaluator, checkpoints), begun_at=begun_at, seconds=seconds, stopped=stopped, out=out
    )


def _last_step(run: Run, evaluator: Evaluator, *, steps: int | None, epochs: int | None) -> int | None:
    """The step with which the run ends; None if only the end of its data will tell."""
    if steps is None and epochs is None:
        raise JobError("train() needs steps or epochs.")
    done = run.trainer.steps
    if evaluator.stopping.is_over:  # in an earlier part of the run
        return done
    left = None if epochs is None else run.loader.steps_until(epochs)
    ends = [] if steps is None else [max(done, steps)]
    ends += [] if left is None else [done + left]
    return min(ends, default=None)


def _loop(
    run: Run,
    watch: StepWatch,
    waits: WaitWatch,
    evaluator: Evaluator,
    callbacks: Callbacks,
    bar: Progress,
    profiler: TrainProfiler,
    *,
    last: int | None,
    epochs: int | None,
    checkpoints: Checkpoints | None,
    preemption: Preemption | None,
) -> None:
    heartbeat = own_heartbeat()
    begins = "compiling" if run.strategy.compile else ""
    task = bar.add_task(str(run.strategy), total=last, completed=run.trainer.steps, loss=begins)
    left = None if last is None else last - run.trainer.steps
    if left != 0:
        evaluator.try_one_batch()
    watch.restart_clock()
    for batch in waits.timed(run.batches(steps=left, epochs=epochs)):
        signalled = preemption is not None and preemption.asked is not None
        run.trainer.wish_to_stop = signalled or callbacks.wishes_to_stop
        with profiler.around(run.trainer.steps + 1):
            result = run.step(batch)
            watch.saw(result, batch)
        heartbeat.step(run.trainer.steps)
        if evaluator.is_due(result):
            watch.catch_up()
            evaluator.evaluate()
            watch.restart_clock()
        if checkpoints is not None and checkpoints.is_due():
            watch.catch_up()  # a state with a NaN loss must not become the last checkpoint
            with heartbeat.doing(SAVING):
                checkpoints.save()
        bar.update(task, advance=1, loss=f"loss {watch.losses[-1]:.4f}" if watch.losses else begins)
        if watch.stop or evaluator.stopping.is_over:
            break
    watch.catch_up()
    if watch.losses:
        bar.update(task, loss=f"loss {watch.losses[-1]:.4f}")


def _about(run: Run) -> Mapping[str, Any]:
    """The run's parameters, for tools that list many runs."""
    about = {"strategy": str(run.strategy), "ranks": run.world.ranks, "device": run.world.device.type}
    return {**about, "global_batch": run.trainer.job.global_batch, "seed": run.trainer.seed}


def _stop_signal(run: Run, preemption: Preemption | None) -> str:
    """The first signal that any rank got."""
    asked = run.world.gather(preemption.asked if preemption is not None else None)
    return next((name for name in asked if name is not None), "a signal")


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


def _say(bar: Progress, line: str) -> None:
    """Print a line above the bar, where the bar is shown."""
    if not bar.disable:
        bar.console.print(line, markup=False, highlight=False)
