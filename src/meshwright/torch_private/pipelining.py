"""PyTorch's pipeline stage and its split backward pass (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
)

__all__ = ["construct_reverse_graph", "get_param_groups"]

graph_node: Callable[[Any], Any] = _get_grad_fn_or_grad_acc
"""A tensor's node in autograd's graph."""


class Stage(PipelineStage):
    """A stage that does not send to its own rank.

    Where a schedule turns round, two neighbouring stages are on one rank. PyTorch 2.11 would have it send to itself.
    """

    def kept_of(self, chunk: int) -> tuple[Any, Any]:
        """The outputs and inputs that a stage keeps of a micro-batch between forward and backward."""
        outputs, inputs = self.fwd_cache[chunk]
        return outputs, inputs

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class Passed:
    """The result of a vote, in the place of a tensor: on fake tensors there would be no value to read."""

    def item(self) -> int:
        return 1


class NoVotes:
    """For a stage whose neighbours are fake. Since PyTorch 2.12 they vote before the first step on whether shapes are
    known; here the vote has passed.
    """

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:
        return Passed()

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        return Passed()
