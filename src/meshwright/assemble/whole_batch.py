"""Forward and backward for a loss over the whole batch, such as a contrastive loss.

Every rank gathers the outputs of all ranks and micro-batches, computes the loss over them and the gradients of its own
outputs. Then each micro-batch is differentiated separately. Several micro-batches run forward twice, first without a
graph, to avoid keeping all their graphs at once (GradCache, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.assemble.batch import Batch, MicroBatch
from meshwright.assemble.gathering import Gathering, UnreadTensor
from meshwright.assemble.metrics import MetricSums
from meshwright.assemble.passes import Dropout, Losses
from meshwright.assemble.world import outside_of_modes
from meshwright.describe.batch_layout import Layout, Listed, Rows, Shared, Unknown, pairs_of, rebuilt
from meshwright.describe.loss_over import WholeLoss, inspect_whole_loss
from meshwright.describe.observe import call_model
from meshwright.describe.samples import Cutter
from meshwright.describe.structure import map_leaves, to_device
from meshwright.errors import JobError
from meshwright.strategies.engine import Engine
from meshwright.torch_private.tensors import version_of


@dataclass(frozen=True)
class Column:
    """One leaf of the outputs, with its value from each of this rank's micro-batches."""

    layout: Layout
    values: list[Any]


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch and its gradients."""

    sums: torch.Tensor
    """The loss's sum and weight."""
    layout: Layout
    """The layout of the outputs."""
    gradients: list[list[torch.Tensor | None]]
    """For each micro-batch, the gradients of its output tensors; empty if nothing is differentiated."""


class WholeBatchLoss:
    """Gathers outputs and batches, and computes the job's loss over them."""

    def __init__(self, losses: Losses, gathering: Gathering, cutter: Cutter, device: torch.device) -> None:
        self._losses, self._gathering, self._cutter, self._device = losses, gathering, cutter, device
        self._seen: dict[int, WholeLoss] = {}
        self._mixed: dict[str, str] = {}
        """Outputs without a sample dim that still depend on samples, with the reason why they cannot be read."""

    def compute(self, batch: Batch, outputs: list[Any], factor: float | None) -> BatchLoss:
        """Compute the loss from this rank's outputs, and differentiate `factor` times it unless `factor` is None."""
        first = not self._seen
        known = self._known(batch)
        columns = _columns(known.outputs, outputs)
        if first:
            self._mixed = self._compare_shared(columns)
        values = [self._gathered(column, batch) for column in columns]
        wanted = [value for value in values if factor is not None and _is_differentiable(value)]
        for value in wanted:
            value.requires_grad_()
        with torch.set_grad_enabled(factor is not None):
            output = rebuilt(known.outputs, outputs[0], iter(values))
            total, weight = self._losses.loss(output, self._whole_batch(known, batch))
            total = self._losses.plain(total)
            found = torch.autograd.grad(total * factor, wanted, allow_unused=True) if wanted else ()
        by_value = {id(value): gradient for value, gradient in zip(wanted, found, strict=True)}
        gradients = [(column.layout, by_value.get(id(value))) for column, value in zip(columns, values, strict=True)]
        number = torch.as_tensor(self._losses.plain(weight), dtype=torch.float64, device=total.device).detach()
        sums = torch.stack([total.detach().double(), number]).to(self._device)
        own = [[self._own(*pair, index, batch) for pair in gradients] for index in range(len(outputs))]
        return BatchLoss(sums, known.outputs, own)

    def _known(self, batch: Batch) -> WholeLoss:
        """The layout of outputs and batches from one source. Inspected once; the result is the same on all ranks."""
        source = self._cutter.data if batch.whole is None else self._cutter.source_of(batch.whole)
        if id(source) not in self._seen:
            with outside_of_modes():
                self._seen[id(source)] = inspect_whole_loss(self._losses.job, source)
        return self._seen[id(source)]

    def _own(self, layout: Layout, gradient: torch.Tensor | None, index: int, batch: Batch) -> torch.Tensor | None:
        """One micro-batch's part of a gradient. A shared value counts in the last micro-batch, divided by the ranks."""
        if gradient is None:
            return None
        if isinstance(layout, Rows):
            span = batch.spans[index]
            return gradient.narrow(layout.dim, span.first, span.length) if span.length else None
        return gradient / self._gathering.share.ranks if index == len(batch.spans) - 1 else None

    def _gathered(self, column: Column, batch: Batch) -> Any:
        layout, last = column.layout, column.values[-1]
        if isinstance(layout, Rows):
            return self._gathering.whole(layout, column.values, batch.samples, regular=batch.regular).detach()
        if isinstance(layout, Listed):
            raise JobError(
                f"{layout.path} is a list with one item per sample, and a loss over the whole batch needs tensors from "
                "the model; stack them."
            )
        why = layout.why if isinstance(layout, Unknown) else self._mixed.get(layout.path)
        if why is None or not isinstance(last, torch.Tensor):
            return last
        return UnreadTensor(
            last.shape, last, f"The loss reads {layout.path} of a batch that is cut into parts, but it {why}."
        )

    def _whole_batch(self, known: WholeLoss, batch: Batch) -> Any:
        pieces = [piece.data for piece in batch.pieces]
        if batch.whole is None and known.batch.unknown() is not None:
            return self._cutter.joined(self._gathering.everything(pieces, batch.samples))
        sources = pieces if batch.whole is None else [batch.whole]
        columns = zip(_columns(known.batch, sources), known.reads, strict=True)
        values = [self._read(column, batch) if read else self._unread(column, batch) for column, read in columns]
        return rebuilt(known.batch, sources[0], iter(values))

    def _read(self, column: Column, batch: Batch) -> Any:
        if batch.whole is not None or isinstance(column.layout, Shared):
            return to_device(column.values[0], self._device)
        return self._gathering.whole(column.layout, column.values, batch.samples, regular=batch.regular)

    def _unread(self, column: Column, batch: Batch) -> Any:
        """A placeholder for a tensor that the loss does not read, so that nothing is sent for it."""
        layout, like = column.layout, column.values[0]
        if not isinstance(like, torch.Tensor):
            return self._read(column, batch)
        shape = [batch.samples if layout == Rows(layout.path, dim) else size for dim, size in enumerate(like.shape)]
        why = f"The loss reads {layout.path} of this batch, but did not when it was inspected."
        return UnreadTensor(shape, like, why)

    def _compare_shared(self, columns: list[Column]) -> dict[str, str]:
        """Shared outputs that differ between micro-batches or ranks, with the reason why they cannot be read."""
        shared = [c for c in columns if isinstance(c.layout, Shared) and isinstance(c.values[0], torch.Tensor)]
        everyone = self._gathering.values([[_first_elements(value) for value in column.values] for column in shared])
        found = {}
        for index, column in enumerate(shared):
            first, *others = [value for rank in everyone for value in rank[index]]
            if not all(torch.allclose(first, other, rtol=1e-5, equal_nan=True) for other in others):
                found[column.layout.path] = (
                    "is computed over the batch by the model, because it differs between the parts. Return one result "
                    "per sample, and compute the rest in Job(loss=...)"
                )
        return found


def _columns(layout: Layout, outputs: list[Any]) -> list[Column]:
    columns = zip(*(pairs_of(layout, output) for output in outputs), strict=True)
    return [Column(column[0][0], [value for _, value in column]) for column in columns]


def _first_elements(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1)[:64].to("cpu", torch.float64)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, UnreadTensor) and value.is_floating_point()


class WholeBatchPasses:
    """Passes of a rank that runs the whole model, or its part of every layer, on its samples."""

    def __init__(
        self, engine: Engine, losses: Losses, dropout: Dropout, whole: WholeBatchLoss, *, counts: bool, measures: bool
    ) -> None:
        """`counts`: whether the loss, which every rank computes, counts here. `measures`: whether its samples do."""
        self.engine, self._losses, self._dropout, self._whole = engine, losses, dropout, whole
        self._counts, self._measures = 1.0 if counts else 0.0, measures

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

    def forward(self, batch: Batch, metrics: MetricSums | None = None) -> torch.Tensor:
        outputs = self._outputs(batch.pieces)
        for output, piece in zip(outputs, batch.pieces, strict=True):
            self._losses.measure(output, piece, metrics, counts=self._measures)
        return self._whole.compute(batch, outputs, None).sums * self._counts

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
