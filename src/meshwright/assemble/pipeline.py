"""A pipeline of stages over ranks, on the runtime of `torch.distributed.pipelining`.

Every stage is the user's whole model, in which calls of other stages are skipped (`stage_model.py`), so no model code
is rewritten. PyTorch runs the schedule: receives, forwards, backwards, sends. All micro-batches of one round have the
same shapes; a remainder follows in a second round of single samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from meshwright.assemble.batch import Batch, MicroBatch, refuse_unlike_shapes
from meshwright.assemble.metrics import MetricSums
from meshwright.assemble.passes import Dropout, Losses
from meshwright.assemble.rank_engine import RankEngine
from meshwright.assemble.stage_model import StageModel
from meshwright.assemble.torch_stage import StageEvent, make_stage
from meshwright.describe.calls import Flow, TensorLeaf
from meshwright.describe.observe import call_model
from meshwright.describe.structure import leaves_of, map_tensors, tensors_of
from meshwright.errors import JobError
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.schedules import FAMILIES
from meshwright.strategies.data.fully_shard import FsdpEngine
from meshwright.strategies.engine import Engine
from meshwright.strategies.pipeline.stages import Crossings, Stages, find_crossings


@dataclass(frozen=True)
class Route:
    """The calls and crossings of micro-batches of one shape."""

    flow: Flow
    crossings: Crossings


@dataclass(frozen=True)
class OwnStage:
    index: int
    stage_model: StageModel
    engine: Engine


class PipelinePasses:
    def __init__(
        self,
        engine: RankEngine,
        own: list[OwnStage],
        stages: Stages,
        losses: Losses,
        dropout: Dropout,
        *,
        schedule: str,
        trace: Callable[[Any], Flow],
        counts: bool,
        fake: bool = False,
        compiled: bool = False,
        steady: bool = True,
    ) -> None:
        self.engine, self._own, self._stages = engine, own, stages
        self._losses, self._dropout, self._trace = losses, dropout, trace
        self._family = FAMILIES[schedule]
        self._counts, self._fake, self._compiled, self._steady = 1.0 if counts else 0.0, fake, compiled, steady
        self.events: list[StageEvent] = []
        """The actions of this rank in the last step, with their times."""
        self._routes: dict[Any, Route] = {}
        self._schedules: dict[Any, Any] = {}
        self._pieces: Sequence[MicroBatch] = ()
        self._route: Route | None = None
        self._next = [0] * len(own)
        self._factor, self._step = 1.0, 0
        self._totals = torch.zeros(2, device=dropout.device)
        self._metrics: MetricSums | None = None
        for place, stage in enumerate(own):
            wrap_forward(stage.stage_model.model, self._stage_forward(place, stage))

    def backward(self, batch: Batch, factor: float, step: int) -> torch.Tensor:
        self._factor, self._step = factor, step
        self.events.clear()
        self._totals = torch.zeros(3, device=self._dropout.device, dtype=torch.float64)
        with self.engine.accumulating(last=False):
            for pieces in self._in_flight(batch):
                self._start(pieces)
                schedule, count = self._prepared(), len(pieces)
                with self.engine.region():
                    schedule.step(*self._dummy_input(count), target=torch.zeros(count), return_outputs=False)
        self.engine.finish()
        return self._totals * self._counts

    def forward(self, batch: Batch, metrics: MetricSums | None = None) -> torch.Tensor:
        self._metrics = metrics
        self._totals = torch.zeros(2, device=self._dropout.device, dtype=torch.float64)
        for pieces in self._in_flight(batch):
            self._start(pieces)
            for _ in pieces:
                sent: tuple[torch.Tensor, ...] = ()
                for stage in self._own:
                    with self.engine.region():
                        sent = self._run_alone(stage, sent)
        self._metrics = None
        return self._totals * self._counts

    def _dummy_input(self, length: int) -> tuple[torch.Tensor, ...]:
        """An argument for the first stage. It reads the batch instead, but FSDP2 fails on a call without arguments."""
        return (torch.zeros(length, device=self._dropout.device),) if self._own[0].index == 0 else ()

    def _in_flight(self, batch: Batch) -> list[Sequence[MicroBatch]]:
        """Micro-batches that run together: those of a round, or one at a time under layer-wise placement."""
        return [[piece] for piece in batch.pieces] if self._family.one_at_a_time else [*batch.rounds]

    def _start(self, pieces: Sequence[MicroBatch]) -> None:
        self._pieces, self._next = pieces, [0] * len(self._own)
        refuse_unlike_shapes(pieces)
        self._route = self._find_route(pieces[0].data)

    def _find_route(self, data: Any) -> Route:
        key = shapes_of(data)
        if key not in self._routes:
            flow = self._trace(data)
            if len(flow.calls) != self._stages.calls:
                raise JobError(
                    f"The model makes {len(flow.calls)} calls for a batch of these shapes and {self._stages.calls} for "
                    "other shapes; a pipeline needs a model that calls its modules in the same order for every batch."
                )
            self._routes[key] = Route(flow, find_crossings(flow, self._stages))
        return self._routes[key]

    def _prepared(self) -> Any:
        """PyTorch's schedule for the current shapes, with receive buffers of these shapes."""
        key = (shapes_of(self._pieces[0].data), len(self._pieces))
        if key not in self._schedules:
            kind = getattr(pipelining, self._family.torch_class)
            stages = [self._torch_stage(stage) for stage in self._own]
            single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
            self._schedules[key] = kind(
                stages[0] if single else stages,
                n_microbatches=len(self._pieces),
                loss_fn=lambda output, target: output,  # the last stage already returns its loss
                scale_grads=False,
            )
        return self._schedules[key]

    def _torch_stage(self, stage: OwnStage) -> Any:
        assert self._route is not None and self.engine.axes.stages is not None
        last = self._stages.is_last(stage.index)
        loss = torch.empty((), device="meta", requires_grad=True)
        return make_stage(
            stage.engine.module,
            stage.index,
            len(self._stages),
            self._dropout.device,
            input_args=self._examples(stage.index) if stage.index else (torch.empty(1, device="meta"),),
            output_args=(loss,) if last else self._examples(stage.index + 1),
            group=self.engine.axes.stages.get_group(),
            fake=self._fake,
            events=self.events,
            recomputing=self._losses.recomputing,
            compiled=self._compiled,
            steady=self._steady,
            done=stage.engine.micro_batch_done,
            fsdp_reduces=isinstance(stage.engine, FsdpEngine) and stage.engine.reduces_each,
        )

    def _examples(self, stage: int) -> tuple[torch.Tensor, ...]:
        """Meta tensors with the shapes and dtypes of those that cross the cut before a stage."""
        return tuple(
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.dtype.is_floating_point)
            for leaf in self._leaves(stage)
        )

    def _leaves(self, stage: int) -> list[TensorLeaf]:
        assert self._route is not None
        calls, found = self._route.flow.calls, []
        for value in self._route.crossings.values[stage]:
            leaf = calls[value.call].leaves[value.leaf]
            assert isinstance(leaf, TensorLeaf), "only tensors have a source, so only they cross a cut"
            found.append(leaf)
        return found

    def _stage_forward(self, place: int, stage: OwnStage) -> Callable[..., Any]:
        """Replaces the model's forward: takes received tensors and returns tensors to send, or the loss.

        Every stage runs micro-batches in order, so counting identifies the current one.
        """

        def run(module: nn.Module, forward: Callable[..., Any], args: tuple[torch.Tensor, ...], kwargs: Any) -> Any:
            assert self._route is not None
            piece = self._pieces[self._next[place]]
            self._next[place] += 1
            self._dropout.seed(self._step, piece.span.first, stage.index)

            if self._route.flow.changes_batch:  # else this rank's next stage would change it again
                piece = replace(piece, data=map_tensors(torch.Tensor.clone, piece.data))

            def whole() -> torch.Tensor:
                output = call_model(self._losses.job, forward, piece.data)
                loss, sums = self._losses.of_output(output, piece)
                self._totals[:2].add_(sums)
                self._losses.measure(output, piece, self._metrics, counts=bool(self._counts))
                return loss * self._factor

            received = args if stage.index else ()
            output = self._losses.plain(stage.stage_model.run(self._route.flow, self._route.crossings, received, whole))
            if self._stages.is_last(stage.index):
                return output.float()  # the dtype given to `make_stage`; its gradient is 1 in any dtype
            return tuple(_Leaving.apply(_with_plain_strides(tensor)) for tensor in output)

        return run

    def _run_alone(self, stage: OwnStage, from_last: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Forward one micro-batch through a stage, with its own receives and sends."""
        mesh = self.engine.axes.stages
        assert mesh is not None and self.engine.holders is not None
        group, ranks = mesh.get_group(), self.engine.holders.ranks
        here = ranks[stage.index]
        received = from_last
        if stage.index > 0 and ranks[stage.index - 1] != here:
            received = tuple(
                torch.empty(leaf.shape, dtype=leaf.dtype, device=self._dropout.device)
                for leaf in self._leaves(stage.index)
            )
            for tensor in received:
                dist.recv(tensor, group_src=ranks[stage.index - 1], group=group)
        output = stage.engine.module(*(received or self._dummy_input(1)))
        if self._stages.is_last(stage.index):
            return ()
        if ranks[stage.index + 1] == here:
            return tuple(output)
        for tensor in output:
            dist.send(tensor.contiguous(), group_dst=ranks[stage.index + 1], group=group)
        return ()


def _with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of the receive buffer. `contiguous()` does not fix dims of length 1."""
    plain = torch.empty(tensor.shape, device="meta").stride()
    return tensor if tensor.stride() == plain else tensor.clone(memory_format=torch.contiguous_format)


class _Leaving(torch.autograd.Function):
    """Gives a sent tensor its own node in the autograd graph, without a copy.

    A tensor that only passes through is also an input of the stage. And PyTorch detaches a stage's outputs in place
    once its inputs have their gradients, which fails on a view and would freeze a parameter.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def shapes_of(data: Any) -> tuple[Any, ...]:
    """What determines a batch's way through the model: shapes, and values that are not tensors."""
    found: list[Any] = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(data)]
    others = [repr(leaf) for leaf in leaves_of(data) if leaf is None or isinstance(leaf, int | float | str)]
    return (*found, *others)
