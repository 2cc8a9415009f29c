"""`pp=N:1f1b` on DeepSpeed: cut a sequential model into stages and run batches through DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.assemble.apply import RankSetup, apply_in_order
from meshwright.assemble.axes import Axes
from meshwright.assemble.batch import Batch, MicroBatch, refuse_unlike_shapes
from meshwright.assemble.metrics import MetricSums
from meshwright.assemble.passes import Dropout, Losses
from meshwright.assemble.precision import cast
from meshwright.describe.structure import tensors_of
from meshwright.errors import JobError
from meshwright.recording.blueprint import record
from meshwright.strategies.deepspeed.pipeline import Layers, StageEngine, ZeroStageEngine, cut_layers, stage_of
from meshwright.strategies.engine import ApplyContext
from meshwright.strategies.pipeline.sizes import count_stages
from meshwright.strategies.pipeline.stages import cut_stages


def build_deepspeed_pipeline(setup: RankSetup, losses: Losses, dropout: Dropout) -> DeepSpeedPasses:
    """Build this rank's stage under a resolved strategy, and the passes that run it."""
    facts, axes = setup.facts, setup.axes
    blueprint = record(losses.job.model, dropout.run_seed, values=setup.world.has_weights)
    layers = cut_layers(blueprint.model, facts, cut_stages(facts, count_stages(setup.strategy), losses.job.stages))
    assert axes.stages is not None and isinstance(blueprint.model, nn.Sequential)
    model: nn.Module = stage_of(blueprint.model, layers.of(axes.stage_rank))
    context = setup.context(blueprint, {}, pipelined=True)
    own = dict(model.named_modules())
    blocks = [own[name] for name in facts.blocks if name in own]
    apply_in_order(model, blocks, setup, called=list(model.children()))
    context.fill()
    return DeepSpeedPasses(model, context, layers, axes, losses, dropout)


class DeepSpeedPasses:
    def __init__(
        self, model: nn.Module, context: ApplyContext, layers: Layers, axes: Axes, losses: Losses, dropout: Dropout
    ) -> None:
        assert axes.stages is not None
        kind = ZeroStageEngine if context.strategy.traits.zero_stage else StageEngine
        self.engine: StageEngine = kind(model, context, layers, axes.stages, self._loss)
        self._context, self._losses, self._dropout = context, losses, dropout
        self._pieces: Sequence[MicroBatch] = ()
        self._next, self._factor, self._step = 0, 1.0, 0
        self._shapes: list[torch.Size] = []
        self._totals = torch.zeros(2, device=dropout.device)
        self._metrics: MetricSums | None = None
        self.engine.before_each = self._begin

    def backward(self, batch: Batch, factor: float, step: int) -> torch.Tensor:
        self._factor, self._step = factor, step
        self._totals = torch.zeros(3, device=self._dropout.device, dtype=torch.float64)
        for number, pieces in enumerate(batch.rounds, start=1):
            self._start(pieces)
            with self._losses.recomputing:
                self.engine.run(self._loaded(), len(pieces), last=number == len(batch.rounds))
        return self._totals

    def forward(self, batch: Batch, metrics: MetricSums | None = None) -> torch.Tensor:
        self._metrics = metrics
        self._totals = torch.zeros(2, device=self._dropout.device, dtype=torch.float64)
        for pieces in batch.rounds:
            self._start(pieces)
            self.engine.run_forward(self._loaded(), len(pieces))
        self._metrics = None
        return self._totals

    def _start(self, pieces: Sequence[MicroBatch]) -> None:
        """Take the next micro-batches. All stages have the same samples, so they see shapes change together."""
        self._pieces, self._next = pieces, 0
        refuse_unlike_shapes(pieces)
        shapes = [tensor.shape for tensor in tensors_of(pieces[0].data)]
        if shapes != self._shapes:
            self.engine.forget_shapes()
        self._shapes = shapes

    def _loaded(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """The first stage's input for each micro-batch, with a dummy label: the last stage has the real ones."""
        for piece in self._pieces:
            given = self._losses.job.inputs(piece.data)
            tensors = list(given.values()) if isinstance(given, Mapping) else list(given)
            if len(tensors) != 1:
                raise JobError(f"An nn.Sequential takes one input, but Job(inputs=...) gave {len(tensors)}.")
            entering = cast(tensors[0], self._context.compute_dtype) if self._context.lowered else tensors[0]
            yield entering, torch.zeros(())

    def _loss(self, output: Any, dummy_label: torch.Tensor) -> torch.Tensor:
        piece = self._pieces[self._next - 1]
        loss, sums = self._losses.of_output(output, piece)
        self._totals[:2].add_(sums)
        self._losses.measure(output, piece, self._metrics, counts=True)
        return loss * self._factor

    def _begin(self) -> None:
        """Seed dropout for the next micro-batch. Every stage runs micro-batches in order, so counting identifies it."""
        self._dropout.seed(self._step, self._pieces[self._next].span.first, self.engine.stage)
        self._next += 1
