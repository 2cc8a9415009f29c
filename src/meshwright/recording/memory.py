"""Give a model's parameters and buffers other memory, and let everything else about them be as it was.

Tensors are swapped in place, so ties and references from anywhere stay. A swap loses attributes that an author has put
on a parameter, its class and its gradient hooks; `TensorTraits` bring them back.
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


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are in a storage: a sparse tensor's are not, nor those of a wrapper of others."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


@dataclass(frozen=True)
class TensorTraits:
    """What belongs to a parameter beside its values."""

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
        """Gradient hooks see a whole gradient, or are refused."""
        if (self.hooks or self.hooks_after) and (is_dtensor(tensor) or tuple(tensor.shape) != shape):
            raise Refused(
                f"The model's builder registered a gradient hook on {name}, of which a rank holds a part under this "
                "strategy, so the hook would see a part of the gradient; use single or ddp, or take the hook away."
            )


def allocate(model: nn.Module, device: torch.device | dict[str, torch.device]) -> None:
    """Memory on `device`, or on one for each name (of a tied tensor the first), with arbitrary content."""
    devices: dict[int, torch.device] = {}
    if isinstance(device, dict):
        for name, tensor in named_tensors(model):
            devices.setdefault(id(tensor), device[name])

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        there = devices[id(tensor)] if isinstance(device, dict) else device
        return torch.empty_like(tensor, device=there) if has_memory(tensor) or is_dtensor(tensor) else tensor.to(there)

    convert(model, on_device)


def drop_weights(model: nn.Module) -> None:
    """Parameters on the meta device. Buffers stay: models look at the values of theirs, and they are small."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        convert(model, lambda tensor: _on_meta(tensor) if isinstance(tensor, nn.Parameter) else tensor)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if not has_memory(tensor):
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def convert(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `change(tensor)` in the place of every parameter and buffer, once for a tied one.

    By `Module._apply`, as `to` does: modules that keep something of their parameters override it.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the original, so that no identity is used twice

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
            f"The model's weights cannot be put in their place: {one_line(error)} {one_line(cause)} Does the builder "
            "keep a tensor that was computed from this parameter? Compute it in forward instead."
        ) from error
    for parameter, own in traits:
        own.give_to(parameter)


@contextmanager
def _swapping() -> Iterator[None]:
    """Conversions of modules keep the parameters' identity; they would untie tied ones otherwise."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def replace_all(model: nn.Module, device: torch.device) -> None:
    """New tensors in the place of all: fake ones cannot be swapped. Tied ones stay tied."""
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
