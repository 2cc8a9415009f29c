"""The loop: batches in, steps, records out."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file

from meshwright.build.step import StepResult
from meshwright.errors import NonFiniteLoss
from meshwright.runtime.measure import peak_bytes
from meshwright.runtime.record import Recorder
from meshwright.runtime.run import Run

WARMUP = 2  # steps that are not counted into the speed: allocators and caches fill in them


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run comes to; the same on every rank."""

    strategy: str
    ranks: int
    device: str
    steps: int
    samples: int
    seconds: float
    step_ms: float
    """Median."""
    samples_per_s: float
    first_loss: float
    last_loss: float
    peak_bytes: list[int]
    """Of each rank."""
    out: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Watch:
    """Turns step results into records; on a GPU one step late, because reading a number waits for the device."""

    def __init__(self, run: Run, recorder: Recorder) -> None:
        self._run, self._recorder = run, recorder
        self._waiting: StepResult | None = None
        self._clock = time.perf_counter()
        self.losses: list[float] = []
        self.times: list[float] = []

    def saw(self, result: StepResult | None) -> None:
        """Take in a new result (None at the end) and write down what is finished."""
        if self._run.world.device.type == "cuda":
            result, self._waiting = self._waiting, result
        if result is not None:
            self._write(result)

    def _write(self, result: StepResult) -> None:
        loss = result.loss
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.losses.append(loss)
        self.times.append(seconds)
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
    run: Run, *, steps: int, out: Path | None = None, tensorboard: bool = False, progress: bool = True
) -> Summary:
    """Train for `steps` optimizer steps. All ranks call it and get the same summary."""
    start = time.perf_counter()
    samples = 0
    with Recorder(out if run.is_main else None, tensorboard=tensorboard) as recorder, _bar(run, progress) as bar:
        watch = Watch(run, recorder)
        task = bar.add_task(str(run.strategy), total=steps, loss="")
        for batch in run.batches(steps=steps):
            samples += batch.samples
            watch.saw(run.step(batch))
            loss = f"loss {watch.losses[-1]:.4f}" if watch.losses else ""
            bar.update(task, advance=1, loss=loss)
        watch.saw(None)
        bar.update(task, loss=f"loss {watch.losses[-1]:.4f}")
    seconds = time.perf_counter() - start
    if out is not None:
        _save_weights(run, out)
    return _summarise(run, watch, steps=steps, samples=samples, seconds=seconds, out=out)


def refuse_non_finite(run: Run, result: StepResult) -> None:
    """All ranks see the same loss, so all of them stop here together."""
    if math.isfinite(result.loss):
        return
    parts = run.world.gather(float(result.totals.local))
    culprits = [rank for rank, value in enumerate(parts) if not math.isfinite(value)] or [0]
    raise NonFiniteLoss(
        f"The loss became {result.loss} at step {result.step}, first on rank {culprits[0]}; "
        "lower the learning rate, set max_norm, or look at that rank's batch."
    )


def _summarise(run: Run, watch: Watch, *, steps: int, samples: int, seconds: float, out: Path | None) -> Summary:
    counted = sorted(watch.times[WARMUP:] or watch.times)
    step_seconds = counted[len(counted) // 2]
    return Summary(
        strategy=str(run.strategy),
        ranks=run.world.ranks,
        device=str(run.world.device.type),
        steps=steps,
        samples=samples,
        seconds=seconds,
        step_ms=step_seconds * 1e3,
        samples_per_s=samples / steps / step_seconds,
        first_loss=watch.losses[0],
        last_loss=watch.losses[-1],
        peak_bytes=run.world.gather(peak_bytes(run.world.device)),
        out=None if out is None else str(out),
    )


def _save_weights(run: Run, out: Path) -> None:
    """The trained weights in the unsplit model's names. Tied names are written once each: they are equal."""
    state = {name: tensor.contiguous().clone() for name, tensor in run.state().items()}
    if run.is_main:
        save_file(state, out / "weights.safetensors")


def _bar(run: Run, wanted: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Where stderr is no terminal a bar would be a wall of text: it is drawn once, at the end.
    console = Console(file=sys.stderr)
    return Progress(*columns, console=console, disable=not (wanted and run.is_main))
