"""Give a model's parameters and buffers new memory and keep everything else about them.

Tensors are swapped in place, so ties and outside references stay valid. A swap loses a parameter's class, its gradient
hooks and the attributes that an author has set on it; `TensorTraits` restore them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import JobError, Refused, one_line
from meshwright.recording.dtensor import is_dtensor
from meshwright.torch_private.modules import convert_tensors
from meshwright.torch_private.tensors import gradient_hooks, is_traceable_wrapper_subclass, set_gradient_hooks


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are in one storage: not so for sparse tensors and wrapper subclasses."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


@dataclass(frozen=True)
class TensorTraits:
    """A parameter's class, attributes and gradient hooks."""

    kind: type
    attributes: dict[str, Any]
    hooks: Any
    hooks_after: Any

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorTraits:
        return TensorTraits(type(tensor), dict(vars(tensor)), *gradient_hooks(tensor))

    def give_to(self, tensor: torch.Tensor) -> None:
        for name, value in self.attributes.items():
            vars(tensor).setdefault(name, value)
        if type(tensor) is nn.Parameter and issubclass(self.kind, nn.Parameter):
            tensor.__class__ = self.kind
        set_gradient_hooks(tensor, self.hooks, self.hooks_after)

    def refuse(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Raise `Refused` if a gradient hook would see only a part of the gradient."""
        if (self.hooks or self.hooks_after) and (is_dtensor(tensor) or tuple(tensor.shape) != shape):
            raise Refused(
                f"The model's builder registered a gradient hook on {name}, but under this strategy a rank holds a "
                "part of it, so the hook would see a part of the gradient; use single or ddp, or remove the hook."
            )


def allocate(model: nn.Module, device: torch.device | dict[str, torch.device]) -> None:
    """Allocate all tensors with arbitrary content on `device`, or on a device for each name (a tied tensor's first)."""
    devices: dict[int, torch.device] = {}
    if isinstance(device, dict):
        for name, tensor in named_tensors(model):
            devices.setdefault(id(tensor), device[name])

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        there = devices[id(tensor)] if isinstance(device, dict) else device
        return torch.empty_like(tensor, device=there) if has_memory(tensor) or is_dtensor(tensor) else tensor.to(there)

    convert(model, on_device)


def drop_weights(model: nn.Module) -> None:
    """Move parameters to the meta device. Buffers stay: models read their values, and they are small."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        convert(model, lambda tensor: _on_meta(tensor) if isinstance(tensor, nn.Parameter) else tensor)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if not has_memory(tensor):
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def convert(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer by `change(tensor)`; a tied tensor is changed once.

    Uses `Module._apply`, as `to` does, because modules that cache something of their parameters override it.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the original alive, so that no id is reused

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, change(tensor)
        return made[id(tensor)][1]

    traits = [(p, TensorTraits.of(p)) for p in model.parameters()]
    for parameter, _ in traits:
        parameter.grad = None
    try:
        with _swapping():
            convert_tensors(model, once)
    except RuntimeError as error:
        cause = error.__cause__ or error
        raise JobError(
            f"The model's weights cannot be replaced: {one_line(error)} {one_line(cause)} Does the builder keep a "
            "tensor that was computed from this parameter? Compute it in forward instead."
        ) from error
    for parameter, own in traits:
        own.give_to(parameter)


@contextmanager
def _swapping() -> Iterator[None]:
    """Keep the identity of parameters in module conversions, which would untie tied ones otherwise."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def replace_all(model: nn.Module, device: torch.device) -> None:
    """Replace all tensors by new ones, because fake tensors cannot be swapped. Tied ones stay tied."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in new:
                    empty = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=device)
                    kept = isinstance(old, nn.Parameter)
                    new[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad) if kept else empty
                tensors[name] = new[id(old)]


@torch.no_grad()
def copy_part(value: torch.Tensor, target: Any) -> None:
    """Copy the rank's part of a full CPU value into `target`. Only that part is read and moved to the device."""
    if is_dtensor(target):
        target.to_local().copy_(own_part(value, target))
    else:
        target.copy_(value)


def own_part(value: torch.Tensor, target: Any) -> torch.Tensor:
    """This rank's part of a value that is sharded as the DTensor `target` is; a view if possible."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, placements = target.device_mesh, target.placements
    if not all(type(placement) in (Shard, Replicate) for placement in placements):
        return distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None).to_local()
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            size, rows = value.shape[placement.dim], -(-value.shape[placement.dim] // mesh.size(axis))
            start = min(size, mesh.get_local_rank(axis) * rows)
            value = value.narrow(placement.dim, start, min(rows, size - start))
    return value
