"""Call a job's callbacks on every rank, and end the run on all ranks if one of them fails on any.

A rank whose callback raises does not leave at once: others would wait for it in the next step. It takes part until all
ranks stop, which it asks for in the same way as a signal does (`Trainer.wish_to_stop`), and then all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.assemble.step_result import StepResult
from meshwright.errors import JobError, one_line
from meshwright.facts.callbacks import EvalEvent, SaveEvent, StepEvent
from meshwright.runtime.run import Run


class Callbacks:
    """The job's callbacks, the first error of one of them, and whether one asked to end the run."""

    def __init__(self, run: Run) -> None:
        self._run, self._job = run, run.trainer.job
        self._epoch = run.epoch if self._has_any else 0
        self._error: Exception | None = None
        self._failed = ""
        """Which callback raised, where and what."""
        self._asked: str | None = None

    @property
    def _has_any(self) -> bool:
        return any((self._job.on_step, self._job.on_eval, self._job.on_save))

    @property
    def wishes_to_stop(self) -> bool:
        """Whether this rank wants the run to end after the next step."""
        return self._error is not None or self._asked is not None

    def stepped(self, result: StepResult) -> None:
        self._epoch = self._epoch if result.ends_epoch is None else result.ends_epoch
        if self._job.on_step is None:
            return
        self._call(
            "on_step",
            self._job.on_step,
            StepEvent(
                step=result.step,
                epoch=self._epoch,
                run=self._run,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                samples=result.samples,
                skipped=result.skipped,
            ),
        )

    def evaluated(self, results: dict[str, float], *, final: bool) -> None:
        if self._job.on_eval is not None:
            step, epoch = self._run.trainer.steps, self._epoch
            event = EvalEvent(step=step, epoch=epoch, run=self._run, results=results, final=final)
            self._call("on_eval", self._job.on_eval, event)

    def saved(self, step: int, path: Path) -> None:
        if self._job.on_save is not None:
            self._call("on_save", self._job.on_save, SaveEvent(step=step, epoch=self._epoch, run=self._run, path=path))

    def stop_reason(self) -> str | None:
        """The callback that ended the run, on any rank; all ranks must call it, and all raise if one failed."""
        everyone = self._run.world.gather((self._failed, self._asked)) if self._has_any else []
        if failed := next((failed for failed, _ in everyone if failed), None):
            raise JobError(failed) from self._error
        return next((asked for _, asked in everyone if asked), None)

    def _call(self, name: str, function: Callable[[Any], Any], event: Any) -> None:
        if self._error is not None:
            return
        try:
            if function(event) is True:
                self._asked = self._asked or f"{name} at step {event.step}"
        except Exception as error:  # whatever a user's function raises
            self._error = error
            place = f"on rank {self._run.world.rank} at step {event.step}"
            self._failed = f"Job({name}=...) failed {place}: {one_line(error)}"
