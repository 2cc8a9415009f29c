"""What a job's callbacks receive. Every rank calls them, with the same values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class _Event:
    step: int
    """Optimizer steps taken."""
    epoch: int
    """Epochs completed."""
    run: Any
    """The `Run`: its `state()`, `evaluate()` and `is_main`. What is collective there must be called on all ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print and write."""
        return bool(self.run.is_main)


@dataclass(frozen=True, kw_only=True)
class StepEvent(_Event):
    """What `Job(on_step=...)` receives."""

    loss: float
    grad_norm: float
    lr: float
    samples: int
    """Of this step's global batch."""
    skipped: bool
    """Whether fp16 gradients overflowed, so that nothing was updated."""


@dataclass(frozen=True, kw_only=True)
class EvalEvent(_Event):
    """What `Job(on_eval=...)` receives."""

    results: Mapping[str, float]
    """The loss and the metrics."""
    final: bool
    """Whether it is the extra evaluation at the end of the run."""


@dataclass(frozen=True, kw_only=True)
class SaveEvent(_Event):
    """What `Job(on_save=...)` receives when a checkpoint is complete."""

    path: Path
