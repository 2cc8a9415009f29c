"""Make all ranks agree on which parameters a step uses, if that depends on their samples.

FSDP2 leaves parameters without a gradient out of a rank's message. Ranks that leave out different parameters would add
up gradients of different parameters. So all ranks send the gradients of all parameters that any rank used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.recording.wrap_forward import wrap_forward
from meshwright.torch_private.trees import tree_flatten, tree_leaves, tree_unflatten


class UsedParameters:
    """Gives zero gradients to parameters that only other ranks use, and none to parameters that no rank uses.

    A block's parameters are whole only while it runs, so they are attached to its output, and others to the loss.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, blocks: Mapping[str, nn.Module]) -> None:
        self._model, self._mesh = model, mesh
        self._used: set[str] = set()
        self._unused: set[str] | None = None
        """Parameters of blocks that no rank has used in this step; None before its first reduction."""
        self._in_blocks = {f"{block}.{name}" for block, module in blocks.items() for name in _trained(module)}
        for name, block in blocks.items():
            inner = tuple(f"{other}."[len(name) + 1 :] for other in blocks if other.startswith(f"{name}."))
            wrap_forward(block, self._around(name, inner))

    def attach_used_elsewhere(self, loss: torch.Tensor, *, reduces: bool) -> torch.Tensor:
        """Attach to the loss the parameters that only other ranks have used since gradients were reduced last."""
        around = {name: p for name, p in _trained(self._model).items() if name not in self._in_blocks}
        self._used |= _reached([loss], around)
        if not reduces:
            return loss
        used = self._by_any_rank(loss.device)
        others = [parameter for name, parameter in around.items() if name in used - self._used]
        self._unused = (self._in_blocks if self._unused is None else self._unused) - used
        self._used = set()
        return _Attach.apply(loss, *others) if others else loss

    def forget_unused(self) -> None:
        """Drop the gradients of parameters that no rank used, after backward."""
        for name, parameter in self._model.named_parameters():
            if name in (self._unused or ()):
                parameter.grad = None
        self._unused = None

    def _around(self, block: str, inner: tuple[str, ...]) -> Callable[..., Any]:
        """`inner`: the prefixes of parameters that belong to blocks inside this one, which have run by then."""

        def around(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not torch.is_grad_enabled():
                return output
            parameters = {name: p for name, p in _trained(module).items() if not name.startswith(inner)}
            leaves, tree = tree_flatten(output)
            reached = _reached(leaves, parameters, until=(args, kwargs))
            self._used |= {f"{block}.{name}" for name in reached}
            others = [parameter for name, parameter in parameters.items() if name not in reached]
            place = next((i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad), None)
            if others and place is not None:
                leaves[place] = _Attach.apply(leaves[place], *others)
            return tree_unflatten(leaves, tree)

        return around

    def _by_any_rank(self, device: torch.device) -> set[str]:
        names = list(_trained(self._model))
        counts = torch.tensor([name in self._used for name in names], dtype=torch.int32, device=device)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(counts, group=self._mesh.get_group(axis))
        return {name for name, count in zip(names, counts.tolist(), strict=True) if count}


class _Attach(torch.autograd.Function):
    """Returns a tensor unchanged; backward gives the other tensors gradients of zeros."""

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
    """The parameters that a backward pass from `tensors` reaches without going past `until`."""
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
