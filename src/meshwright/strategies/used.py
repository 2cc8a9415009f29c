"""Agree on which parameters a step uses, where samples decide it and each rank has other samples.

FSDP2 leaves a parameter without a gradient out of the message that its rank sends. Ranks that leave out different ones
would add gradients of one parameter to those of another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class UsedParameters:
    """Gives a parameter that only other ranks use a gradient of zeros, before backward."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model, self._mesh = model, mesh
        self._used: set[str] = set()

    def with_those_of_others(self, loss: torch.Tensor, *, last: bool) -> torch.Tensor:
        """The loss, hanging on all parameters that any rank used in this step, once its last micro-batch is there."""
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        reached = _reached(loss)
        self._used |= {name for name, parameter in parameters.items() if id(parameter) in reached}
        if not last:
            return loss
        own, self._used = self._used, set()
        used = self._by_any_rank([name in own for name in parameters], loss.device)
        others = [p for (name, p), yes in zip(parameters.items(), used, strict=True) if yes and name not in own]
        return _HangOn.apply(loss, *others) if others else loss

    def _by_any_rank(self, own: list[bool], device: torch.device) -> list[bool]:
        counts = torch.tensor(own, dtype=torch.int32, device=device)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(counts, group=self._mesh.get_group(axis))
        return [count > 0 for count in counts.tolist()]


class _HangOn(torch.autograd.Function):
    """A number as it is, of which further tensors get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.tensors = [(t.shape, t.dtype, t.device) for t in tensors]
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[0], *(torch.zeros(s, dtype=d, device=on) for s, d, on in ctx.tensors)


def _reached(loss: torch.Tensor) -> set[int]:
    """Identities of the leaves that a backward pass would give a gradient."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(after for after, _ in node.next_functions)
    return found
