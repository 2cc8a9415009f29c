"""Whole batches in a user's loop: `forward_backward` and `evaluate`, which run under every strategy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from meshwright.assemble.batch import Share, part
from meshwright.assemble.step import Trainer
from meshwright.describe.observe import call_loss, call_model
from meshwright.describe.samples import Cutter
from meshwright.facts.job import Job
from meshwright.runtime.own_loop import OwnLoop
from meshwright.strategies.norm import local, scale_


class Batches(Protocol):
    """Runs global batches, which are the same on every rank."""

    def forward_backward(self, batch: Any, scale: float) -> torch.Tensor:
        """Add the gradient of `scale` times the batch's mean loss to the gradients, and return that loss."""

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over batches."""


class WholeModelBatches:
    """Batches of a model that every rank calls: each data rank takes its part."""

    def __init__(self, loop: OwnLoop, job: Job) -> None:
        self._loop, self._job, self._cutter = loop, job, Cutter(job)

    def forward_backward(self, batch: Any, scale: float) -> torch.Tensor:
        loss = self._loop.global_mean(*self._part_of_loss(batch))
        (loss * scale).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        model = self._loop.engine.model
        was_training, totals = model.training, torch.zeros(2, dtype=torch.float64, device=self._loop.world.device)
        model.eval()
        for batch in batches:
            total, weight = self._part_of_loss(batch)
            totals += torch.stack([total.double(), torch.as_tensor(weight, device=total.device).double()])
        model.train(was_training)
        total, weight = self._loop.checks.sum_over_data(totals).tolist()
        return float(total / weight)

    def _part_of_loss(self, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """The sum and weight of this rank's part of a batch; zeros if it has no sample."""
        axes = self._loop.axes
        share = Share(ranks=axes.data_ranks, rank=axes.data_rank)
        (piece,) = part(batch, share, self._cutter, nominal=self._job.global_batch).to(self._loop.world.device).pieces
        total, weight = call_loss(self._job, call_model(self._job, self._loop.engine, piece.data), piece.data)
        counts = 1.0 if piece.span.length else 0.0
        return total * counts, weight * counts


class PipelinedBatches:
    """Batches of a pipeline, whose schedule runs forward and backward of all micro-batches together."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def forward_backward(self, batch: Any, scale: float) -> torch.Tensor:
        trainer, engine = self._trainer, self._trainer.engine
        own = engine.parameters()
        before = [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        trainer.forward_backward(batch)
        totals = trainer.take_totals()
        if trainer.loss_scale is not None:
            scale *= engine.gradient_scale / trainer.loss_scale.value
        if scale != 1.0:
            scale_([parameter.grad for parameter in own if parameter.grad is not None], scale)
        engine.forget_gradients()
        for parameter, gradient in zip(own, before, strict=True):
            parameter.grad = _added(gradient, parameter.grad)
        return totals.mean

    def evaluate(self, batches: Iterable[Any]) -> float:
        return self._trainer.evaluate(batches)


@torch.no_grad()
def _added(before: Any, new: Any) -> Any:
    if before is None or new is None:
        return new if before is None else before
    local(before).add_(local(new))
    return before
