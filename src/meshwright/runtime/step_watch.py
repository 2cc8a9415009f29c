"""Turn the results of steps into records, and stop at a loss that is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from meshwright.assemble.step_result import StepResult
from meshwright.errors import NonFiniteLoss
from meshwright.runtime.measure import peak_bytes
from meshwright.runtime.non_finite import find_origin, why_not_searched
from meshwright.runtime.run import Run
from meshwright.runtime.run_records import RunRecorder


class StepWatch:
    """Turns step results into records; on a GPU one step late, because reading a number blocks until it is computed."""

    def __init__(self, run: Run, recorder: RunRecorder, told: Callable[[StepResult], None]) -> None:
        """`told` is called with each result after it is recorded."""
        self._run, self._recorder, self._told = run, recorder, told
        self._waiting: StepResult | None = None
        self._clock = time.perf_counter()
        self.losses: list[float] = []
        self.times: list[float] = []
        self.samples = 0
        self._waited = 0.0
        self.stop = False
        """Whether a result read so far says that some rank wishes to stop; the same on all ranks."""

    def saw(self, result: StepResult, batch: Any = None) -> None:
        """Add a result, and record those that are computed. `batch`: the step's, in case its loss is not finite."""
        if self._run.world.device.type != "cuda" or self._run.trainer.holds_back:
            self._write(result, batch)
            return
        self.catch_up()
        self._waiting = result

    def catch_up(self) -> None:
        """Record all results added so far."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._write(waiting)

    @property
    def device_waits(self) -> float:
        """The share of the steps in which the host waited for a GPU's results; 0 on a CPU."""
        return self._waited / sum(self.times) if self.times and self._run.world.device.type == "cuda" else 0.0

    def restart_clock(self) -> None:
        """Leave what has passed since the last step out of the next step's time."""
        self._clock = time.perf_counter()

    def _write(self, result: StepResult, batch: Any = None) -> None:
        begun = time.perf_counter()
        loss, now = result.loss, time.perf_counter()
        self._waited += now - begun
        seconds, self._clock = now - self._clock, now
        self.losses.append(loss)
        self.times.append(seconds)
        self.samples += result.samples
        self.stop = self.stop or result.stop
        refuse_non_finite(self._run, result, batch)
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
        self._told(result)


def refuse_non_finite(run: Run, result: StepResult, batch: Any = None) -> None:
    """Stop at a loss or a gradient that is not finite. All ranks see the same numbers, so they stop together."""
    spoilt = not result.skipped and not math.isfinite(result.grad_norm)
    held_back = result.skipped and run.trainer.loss_scale is None
    if math.isfinite(result.loss) and not spoilt and not held_back:
        return
    what = "loss" if not math.isfinite(result.loss) else "gradient's norm"
    value = result.loss if what == "loss" else result.grad_norm
    rank, where = _culprit(run, result, batch)
    raise NonFiniteLoss(
        f"The {what} became {value} at step {result.step}, first on rank {rank}{where}; "
        "lower the learning rate, set max_norm, or check that rank's batch."
    )


def _culprit(run: Run, result: StepResult, batch: Any) -> tuple[int, str]:
    """The first rank with numbers that are not finite, and where, as words."""
    parts = run.world.gather(float(result.totals.local))
    first = next((rank for rank, value in enumerate(parts) if not math.isfinite(value)), 0)
    if reason := why_not_searched(run.trainer):
        return first, f" ({reason})"
    rank, where = find_origin(run.trainer, batch)
    return (rank, f", {where}") if where else (first, ", not in a module but in the loss or in the sum of gradients")
