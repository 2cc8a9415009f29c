"""Evaluate while a run trains: when it is due, what is recorded, and whether the run ends early."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isfinite
from typing import Any

from meshwright.assemble.step_result import StepResult
from meshwright.facts.evaluation import LOSS, Evaluation
from meshwright.launch.heartbeat import EVALUATING, own_heartbeat
from meshwright.runtime.callbacks import Callbacks
from meshwright.runtime.early_stop import EarlyStopping
from meshwright.runtime.run import Run
from meshwright.runtime.run_records import RunRecorder

COUNT, LAST = "evaluations", "evaluation"


class Evaluator:
    """The evaluations of a run. What it knows is in `Trainer.loop`, which checkpoints keep."""

    def __init__(self, run: Run, recorder: RunRecorder, callbacks: Callbacks, say: Callable[[str], None]) -> None:
        self._run, self._recorder, self._callbacks, self._say = run, recorder, callbacks, say
        self._evaluation: Evaluation | None = run.trainer.job.evaluation
        self._kept = run.trainer.loop
        self.stopping = EarlyStopping(run.trainer.job.early_stop, self._kept)

    def try_one_batch(self) -> None:
        """Find a metric that fails now instead of hours later."""
        if self._evaluation is not None:
            self._run.measure(batches=1)

    def is_due(self, result: StepResult) -> bool:
        """Whether to evaluate after a step."""
        asked = self._evaluation
        if asked is None:
            return False
        at_step = asked.every is not None and result.step % asked.every == 0
        return at_step or (asked.each_epoch and result.ends_epoch is not None)

    def evaluate(self) -> None:
        """Evaluate between two steps. All ranks call it."""
        results = self._measure(final=False)
        self._kept[COUNT] = self._kept.get(COUNT, 0) + 1
        self._run.trainer.evaluated(results[LOSS], self._kept[COUNT])
        self.stopping.saw(self._run.trainer.steps, results)

    def evaluate_at_the_end(self) -> None:
        """Evaluate the last step, unless that is done. It does not count for early stops and schedules.

        A run that goes on from here would otherwise differ from one that was not interrupted.
        """
        last = self._kept.get(LAST, {}).get("step")
        if self._evaluation is not None and last != self._run.trainer.steps:
            self._measure(final=True)

    @property
    def last(self) -> dict[str, Any] | None:
        """The step and the results of the last evaluation, None for what is not finite."""
        found = self._kept.get(LAST)
        return None if found is None else {name: value if isfinite(value) else None for name, value in found.items()}

    def _measure(self, *, final: bool) -> dict[str, float]:
        begun, step, epoch = time.perf_counter(), self._run.trainer.steps, self._run.epoch
        with own_heartbeat().doing(EVALUATING):
            results = self._run.measure()
        self._kept[LAST] = {"step": step, **results}
        record = {"step": step, "epoch": epoch, **results, "seconds": time.perf_counter() - begun, "final": final}
        self._recorder.write_evaluation(record)
        self._say(f"step {step}, evaluation: {', '.join(f'{name} {value:.5g}' for name, value in results.items())}")
        self._callbacks.evaluated(results, final=final)
        return results
