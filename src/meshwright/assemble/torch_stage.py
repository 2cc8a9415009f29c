"""PyTorch's pipeline stage, with a clock, and with company made up where other ranks do not exist."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from meshwright.torch_private.pipelining import NoVotes, Stage, construct_reverse_graph, get_param_groups, graph_node


@dataclass(frozen=True)
class StageEvent:
    """One action as it ran: `2F0` is the forward pass of micro-batch 0 on stage 2. Waiting is not part of it."""

    action: str
    start: float
    end: float


class SafeSplitStage(Stage):
    """Splits the backward pass into inputs and weights only where PyTorch does that right.

    PyTorch takes a weight's gradient from the place where the weight meets what depends on the stage's inputs. It loses
    the gradient of a branch that meets nothing (a second embedding, sent on as it is), and stumbles over a weight that
    is read in several places. On such a stage the whole backward pass runs where that of the inputs would.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._splits: bool | None = None
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
        """Whether each weight meets the inputs' graph in one place; seen on the first micro-batch, as all are alike."""
        if self._splits is None:
            outputs, inputs = self.kept_of(chunk)
            edges = construct_reverse_graph(_nodes([loss] if self.is_last else outputs))
            weights = [node for node in _nodes(self.submod.parameters()) if node in edges]
            groups = get_param_groups(_nodes(inputs), weights, edges)
            met = sum(len(group["params"]) for group in groups)
            self._splits = met == len(weights) and all(len(group["intermediates"]) == 1 for group in groups)
        return self._splits


def _nodes(tensors: Any) -> list[Any]:
    """Their nodes in autograd's graph."""
    wanted = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    return [graph_node(tensor) for tensor in wanted]


class TimedStage(SafeSplitStage):
    """Notes when it computes, if it is given a list to note it in. On a GPU these are the host's times."""

    events: list[StageEvent] | None = None
    recomputing: AbstractContextManager[Any] = nullcontext()
    """Around backward."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("B" if kwargs.get("full_backward", True) else "I", bwd_chunk_id), self.recomputing:
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("W", bwd_chunk_id), self.recomputing:
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def _timed(self, kind: str, chunk: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.events is not None:
            self.events.append(StageEvent(f"{self.stage_index}{kind}{chunk}", start, time.perf_counter()))


class FakeWorldStage(NoVotes, TimedStage):
    """A stage that knows its shapes and asks nobody."""


def make_stage(
    *args: Any, fake: bool, events: list[StageEvent] | None, recomputing: AbstractContextManager[Any], **kwargs: Any
) -> PipelineStage:
    stage = (FakeWorldStage if fake else TimedStage)(*args, **kwargs)
    stage.events, stage.recomputing = events, recomputing
    return stage
