"""Forward and backward for a loss over the whole batch, such as a contrastive loss.

Every rank computes the loss over all outputs and the gradients of its own outputs. Then each micro-batch is
differentiated separately. Several micro-batches run forward twice, first without a graph, to avoid keeping all their
graphs at once (GradCache, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.assemble.batch import Batch, MicroBatch
from meshwright.assemble.passes import Dropout, Losses
from meshwright.assemble.whole_batch_loss import BatchLoss, WholeBatchLoss
from meshwright.describe.batch_layout import pairs_of
from meshwright.describe.observe import call_model
from meshwright.describe.structure import map_leaves
from meshwright.errors import JobError
from meshwright.strategies.engine import Engine
from meshwright.torch_private.tensors import version_of


class WholeBatchPasses:
    """Passes of a rank that runs the whole model, or its part of every layer, on its samples."""

    def __init__(
        self, engine: Engine, losses: Losses, dropout: Dropout, whole: WholeBatchLoss, *, counts: bool
    ) -> None:
        """`counts`: whether the loss, which every rank computes, counts on this rank."""
        self.engine, self._losses, self._dropout, self._whole = engine, losses, dropout, whole
        self._counts = 1.0 if counts else 0.0

    def backward(self, batch: Batch, factor: float, step: int) -> torch.Tensor:
        pieces, found = batch.pieces, None
        if len(pieces) > 1:
            found = self._loss(batch, self._first_outputs(pieces, step), factor, step)
        for index, piece in enumerate(pieces):
            with self.engine.accumulating(last=index == len(pieces) - 1), self.engine.region():
                output = self._output(piece, step)
                found = found or self._loss(batch, [_detached(output)], factor, step)
                with self._losses.recomputing:
                    self.engine.backward(_product(output, found, index))
        self.engine.finish()
        assert found is not None
        return torch.cat([found.sums, found.sums.new_zeros(1)]) * self._counts

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._whole.compute(batch, self._outputs(batch.pieces), None).sums * self._counts

    def _loss(self, batch: Batch, outputs: list[Any], factor: float, step: int) -> BatchLoss:
        self._dropout.seed(step, 0)  # the same on all ranks
        return self._whole.compute(batch, outputs, factor)

    def _output(self, piece: MicroBatch, step: int | None) -> Any:
        if step is not None:
            self._dropout.seed(step, piece.span.first)
        return self._losses.plain(call_model(self._losses.job, self.engine, piece.data))

    @torch.no_grad()
    def _outputs(self, pieces: list[MicroBatch], step: int | None = None) -> list[Any]:
        found = []
        for piece in pieces:
            with self.engine.region():
                found.append(_detached(self._output(piece, step)))
        return found

    def _first_outputs(self, pieces: list[MicroBatch], step: int) -> list[Any]:
        """The outputs of the first of two runs. Raises if the model changes buffers, which it would do twice."""
        buffers = dict(self.engine.model.named_buffers())
        before = {name: version_of(buffer) for name, buffer in buffers.items()}
        outputs = self._outputs(pieces, step)
        changed = [name for name, buffer in buffers.items() if version_of(buffer) != before[name]]
        if changed:
            raise JobError(
                f"The model changes its buffer {changed[0]} in forward, and a loss over the whole batch runs "
                "micro-batches forward twice; leave out mb."
            )
        return outputs


def _detached(output: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)


def _product(output: Any, found: BatchLoss, index: int) -> torch.Tensor:
    """A scalar whose gradient with respect to a micro-batch's outputs is the one in `found`."""
    pairs = zip(pairs_of(found.layout, output), found.gradients[index], strict=True)
    tensors = [(value, gradient) for (_, value), gradient in pairs if isinstance(value, torch.Tensor)]
    return torch.stack([_dot(*pair) for pair in tensors if pair[0].requires_grad]).sum()


def _dot(value: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """The dot product; zero without a gradient, so that backward still reaches every parameter."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return wide.sum() * 0.0 if gradient is None else (wide * gradient.to(wide.dtype)).sum()
