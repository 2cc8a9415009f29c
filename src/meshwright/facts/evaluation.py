"""What a job measures while it trains: evaluation data, metrics, and the rule that stops a run early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.errors import JobError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

LOSS = "loss"
RESERVED = (LOSS, "step", "epoch", "seconds", "final")
"""Names in the record of an evaluation that no metric may have."""
TRAINED, EMA = "trained", "ema"
LOWER, HIGHER = "lower", "higher"

Pair = Callable[[Any, Any], tuple[Any, Any]]
"""From (output, batch) to (sum, weight), like a loss."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric that is not one sum divided by one weight, such as F1 or perplexity."""

    sums: Callable[[Any, Any], torch.Tensor]
    """From (output, batch) to a tensor of numbers that are added up over all samples."""
    result: Callable[[list[float]], float]
    """From the totals to the metric."""


def mean_of(pair: Pair) -> Metric:
    """The metric of a function that returns (sum, weight): the quotient of the totals."""

    def sums(output: Any, batch: Any) -> torch.Tensor:
        import torch

        return torch.stack([torch.as_tensor(value).detach().double().cpu() for value in pair(output, batch)])

    return Metric(sums=sums, result=lambda totals: totals[0] / totals[1] if totals[1] else float("nan"))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation during training, over every sample of a dataset once."""

    data: Callable[[], Dataset[Any]] | Dataset[Any]
    """A map-style dataset, or a function that builds one. Samples are read in order."""
    metrics: Mapping[str, Pair | Metric] = field(default_factory=dict)
    """By name: functions from (output, batch) to (sum, weight), like the loss, which is always measured."""
    every: int | None = None
    """Evaluate after every N optimizer steps."""
    each_epoch: bool = True
    """Evaluate after the last step of each epoch."""
    weights: str = TRAINED
    """"trained", or "ema" for the averaged weights of `Job(ema=...)`."""
    batch: int | None = None
    """Samples of a global batch; None: the job's."""
    collate: Callable[[list[Any]], Any] | None = None
    """None: the job's."""

    def __post_init__(self) -> None:
        for option in ("every", "batch"):
            value = getattr(self, option)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise JobError(f"Evaluation({option}=...) must be a whole number above 0, but it is {value!r}.")
        if self.weights not in (TRAINED, EMA):
            raise JobError(f'Evaluation(weights=...) must be "trained" or "ema", but it is {self.weights!r}.')
        for name, metric in self.metrics.items():
            if name in RESERVED:
                raise JobError(f"A metric cannot be named {name!r}: every evaluation has that value already.")
            if not callable(metric) and not isinstance(metric, Metric):
                raise JobError(f"The metric {name!r} must be a function or a Metric, not {type(metric).__name__}.")

    def measured(self) -> dict[str, Metric]:
        """All metrics as sums and results."""
        return {n: metric if isinstance(metric, Metric) else mean_of(metric) for n, metric in self.metrics.items()}


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Ends a run when a metric has not improved for some evaluations."""

    metric: str = LOSS
    patience: int = 3
    """Evaluations in a row without an improvement after which the run ends."""
    better: str = LOWER
    """"lower" or "higher"."""
    by_at_least: float = 0.0
    """A smaller improvement than this does not count."""

    def __post_init__(self) -> None:
        if self.better not in (LOWER, HIGHER):
            raise JobError(f'EarlyStop(better=...) must be "lower" or "higher", but it is {self.better!r}.')
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            raise JobError(f"EarlyStop(patience=...) must be a whole number above 0, but it is {self.patience!r}.")
        if not self.by_at_least >= 0:
            raise JobError(f"EarlyStop(by_at_least=...) must not be negative, but it is {self.by_at_least!r}.")

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far. NaN never is."""
        if value != value:
            return False
        if best is None:
            return True
        gain = best - value if self.better == LOWER else value - best
        return gain > self.by_at_least
