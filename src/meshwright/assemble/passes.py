"""Forward and backward over one rank's part of a global batch, one micro-batch at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isclose
from typing import Any, Protocol

import numpy
import torch

from meshwright.assemble.batch import Batch, MicroBatch
from meshwright.assemble.metrics import MetricSums
from meshwright.describe.observe import call_model
from meshwright.errors import JobError
from meshwright.facts.job import Job
from meshwright.strategies.engine import Engine

Loss = Callable[[Any, Any], tuple[torch.Tensor, float | torch.Tensor]]


class Passes(Protocol):
    """How a strategy runs a batch. Both methods return the sum and the weight of this rank's loss.

    `backward` also returns a zero, in which the trainer sends its wish to stop.
    """

    @property
    def engine(self) -> Engine: ...

    def backward(self, batch: Batch, factor: float, step: int) -> torch.Tensor:
        """Compute the gradients of `factor` times this rank's summed loss."""

    def forward(self, batch: Batch, metrics: MetricSums | None = None) -> torch.Tensor:
        """Compute the loss only, and add to the metrics."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Computes the loss of a micro-batch from the model's output."""

    job: Job
    loss: Loss
    weight_per_sample: float | None
    """Set if the weight follows from shapes; then it is checked instead of summed."""
    plain: Callable[[Any], Any] = lambda tree: tree
    """Turns tensors that model axes divide into plain ones that autograd and sends can handle."""
    recomputing: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Context for backward, in which a model's own checkpointing recomputes with the dtypes of its first run."""

    def of_output(self, output: Any, piece: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss to differentiate, and its (sum, weight). Both are zero for a stand-in."""
        total, weight = self.loss(output, piece.data)
        total = self.plain(total)
        counts = 1.0 if piece.span.length else 0.0
        expected = self.weight_per_sample if piece.regular else None
        kept = total.detach().to(torch.promote_types(total.dtype, torch.float32)) * counts
        if expected is None:
            value = self.plain(weight)
            # A number becomes a tensor by a kernel: a copy from the host would wait for the device.
            on_device = value.to(kept) if torch.is_tensor(value) else kept.new_full((), float(value))
            return total * counts, torch.stack([kept, on_device * counts])
        if piece.span.length and not isclose(float(weight), expected * piece.span.length, rel_tol=1e-9):
            raise JobError(
                f"Job(loss=...) gave the weight {weight} for {piece.span.length} samples, but {expected:g} per sample "
                "when the model was described: these samples have another size, or the weight follows from values. "
                "Return a weight that depends on the data as a tensor."
            )
        return total * counts, torch.stack([kept, kept.new_full((), float(weight) * counts)])

    def measure(self, output: Any, piece: MicroBatch, metrics: MetricSums | None, *, counts: bool) -> None:
        """Add an output to the metrics. All ranks must call it, because an output may be divided over them."""
        if metrics:
            metrics.add(self.plain(output), piece, counts=counts)


class PlainPasses:
    """Passes of a rank that runs the whole model, or its part of every layer."""

    def __init__(self, engine: Engine, losses: Losses, dropout: Dropout, *, counts: bool) -> None:
        self.engine, self._losses, self._dropout = engine, losses, dropout
        self._counts = 1.0 if counts else 0.0

    def backward(self, batch: Batch, factor: float, step: int) -> torch.Tensor:
        pieces = batch.pieces
        totals = torch.zeros(3, device=self._dropout.device, dtype=torch.float64)
        for index, piece in enumerate(pieces):
            with self.engine.accumulating(last=index == len(pieces) - 1), self.engine.region():
                self._dropout.seed(step, piece.span.first)
                loss, sums = self._losses.of_output(call_model(self._losses.job, self.engine, piece.data), piece)
                with self._losses.recomputing:
                    self.engine.backward(loss * factor)
            totals[:2].add_(sums.to(totals.device))  # the loss may be on another device of this process
        self.engine.finish()
        return totals * self._counts

    def forward(self, batch: Batch, metrics: MetricSums | None = None) -> torch.Tensor:
        totals = torch.zeros(2, device=self._dropout.device, dtype=torch.float64)
        for piece in batch.pieces:
            with self.engine.region():
                output = call_model(self._losses.job, self.engine, piece.data)
                totals += self._losses.of_output(output, piece)[1].to(totals.device)
                self._losses.measure(output, piece, metrics, counts=bool(self._counts))
        return totals * self._counts


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Seeds the random generators from the run's seed, the step and the position in the global batch, never the rank.

    So two strategies that cut the batch into the same micro-batches draw the same masks, also from Python's and numpy's
    generators.
    """

    run_seed: int
    device: torch.device

    def seed(self, step: int, first: int, stage: int = 0) -> None:
        seed = (((self.run_seed * 1_000_003 + step) * 1_000_003 + first) * 1_003 + stage) % 2**63
        seed_host(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)  # layers=N may use several GPUs in one process


def seed_host(seed: int) -> None:
    """Seed the host's generators that a model, a dataset or a collate may use: torch's, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
