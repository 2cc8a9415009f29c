"""PyTorch's pipeline stage with timing, and with fake neighbours when one rank is traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from meshwright.torch_private.pipelining import NoVotes, Stage, construct_reverse_graph, get_param_groups, graph_node


@dataclass(frozen=True)
class StageEvent:
    """One action with its times, without waiting: `2F0` is the forward pass of micro-batch 0 on stage 2."""

    action: str
    start: float
    end: float


class SafeSplitStage(Stage):
    """Splits backward into inputs and weights only if PyTorch does that correctly for the stage.

    PyTorch computes a weight's gradient from the node where the weight meets the graph of the stage's inputs. It loses
    the gradient of a branch that meets no input (a second embedding, sent on unchanged), and fails on a weight that is
    read in several places. Such a stage runs its whole backward pass in place of the inputs' part. So does one with
    compiled blocks: each is one node of the graph.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.splits: bool | None = None
        self.steady = True
        """Whether all micro-batches have the first one's graph; under `tp` recorded programs replace it later."""
        self._whole: set[int] = set()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward and not self.is_first and not self._can_split(bwd_chunk_id, loss):
            self._whole.add(bwd_chunk_id)
            full_backward = True
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
        else:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _can_split(self, chunk: int, loss: Any) -> bool:
        """Whether each weight meets the inputs' graph in one place. Checked on the first micro-batch if steady."""
        if self.splits is None or (self.splits and not self.steady):
            outputs, inputs = self.kept_of(chunk)
            edges = construct_reverse_graph(_nodes([loss] if self.is_last else outputs))
            weights = [node for node in _nodes(self.submod.parameters()) if node in edges]
            groups = get_param_groups(_nodes(inputs), weights, edges)
            met = sum(len(group["params"]) for group in groups)
            self.splits = met == len(weights) and all(len(group["intermediates"]) == 1 for group in groups)
        return self.splits


def _nodes(tensors: Any) -> list[Any]:
    return [graph_node(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]


class TimedStage(SafeSplitStage):
    """Appends its actions to `events`. On a GPU these are host times."""

    events: list[StageEvent] | None = None
    recomputing: AbstractContextManager[Any] = nullcontext()
    """Context for backward."""
    done: Callable[[], None] = staticmethod(lambda: None)
    """Called when a micro-batch's gradients of the weights are there."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        whole = kwargs.get("full_backward", True)
        with self._timed("B" if whole else "I", bwd_chunk_id), self.recomputing:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            if whole:
                self.done()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("W", bwd_chunk_id), self.recomputing:
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.done()

    @contextmanager
    def _timed(self, kind: str, chunk: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.events is not None:
            self.events.append(StageEvent(f"{self.stage_index}{kind}{chunk}", start, time.perf_counter()))


class FakeWorldStage(NoVotes, TimedStage):
    """A stage that knows its shapes and does not exchange them with other ranks."""


def make_stage(
    *args: Any,
    fake: bool,
    events: list[StageEvent] | None,
    recomputing: AbstractContextManager[Any],
    done: Callable[[], None],
    fsdp_reduces: bool,
    compiled: bool,
    steady: bool,
    **kwargs: Any,
) -> PipelineStage:
    stage = (FakeWorldStage if fake else TimedStage)(*args, **kwargs)
    stage.steady = steady
    if compiled:
        stage.splits = False
    stage.events, stage.recomputing, stage.done, stage.fsdp_reduces = events, recomputing, done, fsdp_reduces
    return stage
