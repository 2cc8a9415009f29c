"""Agree on which parameters a step uses, where samples decide it and each rank has other samples.

FSDP2 leaves a parameter without a gradient out of the message that its rank sends. Ranks that leave out different ones
would add gradients of one parameter to those of another. So all ranks send all that any rank used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.forward import wrap_forward
from meshwright.torch_private.trees import tree_flatten, tree_leaves, tree_unflatten


class UsedParameters:
    """Gives parameters that this rank does not use gradients of zeros, and those that no rank uses none.

    A block's parameters are whole only while it runs, so there they hang on its output. The others hang on the loss.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, blocks: Mapping[str, nn.Module]) -> None:
        self._model, self._mesh = model, mesh
        self._used: set[str] = set()
        self._unused: set[str] = set()
        self._in_blocks = {
            f"{block}.{name}" for block, module in blocks.items() for name, _ in _trained(module).items()
        }
        for name, block in blocks.items():
            wrap_forward(block, self._around(name))

    def with_those_of_others(self, loss: torch.Tensor, *, last: bool) -> torch.Tensor:
        """The loss, hanging on all parameters that any rank used in this step, once its last micro-batch is there."""
        around = {name: p for name, p in _trained(self._model).items() if name not in self._in_blocks}
        self._used |= _reached([loss], around)
        if not last:
            return loss
        used = self._by_any_rank(loss.device)
        others = [parameter for name, parameter in around.items() if name in used - self._used]
        self._unused, self._used = self._in_blocks - used, set()
        return _HangOn.apply(loss, *others) if others else loss

    def forget_unused(self) -> None:
        """After backward: what no rank used has no gradient, as in one process."""
        for name, parameter in self._model.named_parameters():
            if name in self._unused:
                parameter.grad = None

    def _around(self, block: str) -> Callable[..., Any]:
        def around(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not torch.is_grad_enabled():
                return output
            parameters = _trained(module)
            leaves, tree = tree_flatten(output)
            reached = _reached(leaves, parameters, until=(args, kwargs))
            self._used |= {f"{block}.{name}" for name in reached}
            others = [parameter for name, parameter in parameters.items() if name not in reached]
            place = next((i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad), None)
            if others and place is not None:
                leaves[place] = _HangOn.apply(leaves[place], *others)
            return tree_unflatten(leaves, tree)

        return around

    def _by_any_rank(self, device: torch.device) -> set[str]:
        names = list(_trained(self._model))
        counts = torch.tensor([name in self._used for name in names], dtype=torch.int32, device=device)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(counts, group=self._mesh.get_group(axis))
        return {name for name, count in zip(names, counts.tolist(), strict=True) if count}


class _HangOn(torch.autograd.Function):
    """A tensor as it is, of which further tensors get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[0], *(torch.zeros(s, dtype=d, device=on) for s, d, on in ctx.others)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _reached(tensors: list[Any], parameters: Mapping[str, nn.Parameter], until: Any = ()) -> set[str]:
    """Those of the parameters that a backward pass from `tensors` would give a gradient, not going past `until`."""
    found: set[int] = set()
    seen: set[Any] = {leaf.grad_fn for leaf in tree_leaves(until) if torch.is_tensor(leaf)}
    waiting = [leaf.grad_fn for leaf in tensors if torch.is_tensor(leaf)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(after for after, _ in node.next_functions)
    return {name for name, parameter in parameters.items() if id(parameter) in found}
