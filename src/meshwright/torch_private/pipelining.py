"""PyTorch's pipeline stage and its split backward pass (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    stage_backward,
)

__all__ = ["construct_reverse_graph", "get_param_groups"]

graph_node: Callable[[Any], Any] = _get_grad_fn_or_grad_acc
"""A tensor's node in autograd's graph."""


class Stage(PipelineStage):
    """A stage that never sends to its own rank, and in which FSDP may reduce gradients in every backward pass.

    In V-shaped schedules two neighbouring stages share a rank, and PyTorch 2.11 would have it send to itself. PyTorch
    keeps FSDP's gradients whole until the last micro-batch.
    """

    fsdp_reduces = False

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full" or not self.fsdp_reduces:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert isinstance(self.submod, FSDPModule)
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(True)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None

    def kept_of(self, chunk: int) -> tuple[Any, Any]:
        """The outputs and inputs of a micro-batch that are kept from forward to backward."""
        outputs, inputs = self.fwd_cache[chunk]
        return outputs, inputs

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class Passed:
    """The result of a vote, in place of a tensor: a fake tensor would have no value to read."""

    def item(self) -> int:
        return 1


class NoVotes:
    """Mixin for a stage with fake neighbours: the vote on shapes, new in PyTorch 2.12, passes without them."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:
        return Passed()

    def _warmup_backward_result(self, received_result: Any = None) -> Any:
        return Passed()
