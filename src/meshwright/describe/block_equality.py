"""When two blocks are of one kind, and two calls alike: what decides, as values that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.modules import REGISTERED
from meshwright.torch_private.tensors import storage_id

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, Enum)
SAME = (FunctionType, BuiltinFunctionType, type, torch.Tensor, nn.Module)
"""What is alike only if it is the very same object."""


class NotComparable(Exception):
    """Something that cannot be compared, so it is taken for different."""


def kind_of(block: nn.Module, *, numbered: bool = False) -> Any:
    """Equal for blocks with the same modules, the same layout of parameters and buffers, and equal attributes.

    Where blocks are `numbered`, attributes that are whole numbers may differ.
    """
    return _layout_of(block), state_of(block, numbered=numbered)


def size_of(block: nn.Module) -> Any:
    """Equal for blocks that cost the same: of their attributes only those that modules print have to be equal."""
    return _layout_of(block), tuple(module.extra_repr() for module in block.modules())


def _layout_of(block: nn.Module) -> Any:
    numbers: dict[int, int] = {}  # so that what is tied inside of one block must be tied in the other

    def number(thing: object) -> int:
        return numbers.setdefault(id(thing), len(numbers))

    def layout(tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        return number(tensor), type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad

    structure = []
    for name, module in block.named_modules(remove_duplicate=False):
        tensors = [(key, layout(t)) for table in (module._parameters, module._buffers) for key, t in table.items()]
        structure.append((name, number(module), type(module), tuple(tensors)))
    return tuple(structure)


def state_of(block: nn.Module, *, numbered: bool = False) -> Any:
    """All attributes of a block and the modules in it. It differs once any of them has been set or added to."""
    seen: dict[int, Any] = {}
    return tuple(
        tuple(
            (key, int if numbered and type(value) is int else _value(value, seen))
            for key, value in vars(module).items()
            if key not in REGISTERED
        )
        for module in block.modules()
    )


def numbers_of(block: nn.Module) -> dict[tuple[str, str], int]:
    """Attributes that are whole numbers, by module in the block and name."""
    return {
        (name, key): value
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if type(value) is int
    }


def arrival_of(value: Any, tensors: list[torch.Tensor], other: Callable[[Any], Any] | None = None) -> Any:
    """Equal for inputs of the same layout. Their tensors are appended to `tensors` in order.

    What cannot be compared raises `NotComparable`, or is compared by `other`.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        same = [_identity(tensor) for tensor in tensors].index(_identity(value))
        layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
        return "tensor", same, type(value), layout, value.requires_grad
    if type(value) in (tuple, list):
        return type(value), tuple(arrival_of(item, tensors, other) for item in value)
    if type(value) is dict:
        return dict, tuple((key, arrival_of(item, tensors, other)) for key, item in value.items())
    if isinstance(value, PLAIN):
        return type(value), value
    if other is None:
        raise NotComparable
    return other(value)


def surroundings() -> Any:
    """What a call finds around it."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _identity(tensor: torch.Tensor) -> Any:
    return storage_id(tensor.untyped_storage())


def _value(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, SAME):
        return id(value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = id(value)  # where an object holds itself
    seen[id(value)] = _content(value, seen)
    return seen[id(value)]


def _content(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return type(value), tuple((_value(key, seen), _value(item, seen)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(_value(item, seen) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_value(item, seen) for item in value)
    if hasattr(value, "__dict__"):
        # An object that blocks share, a config say: the same one, with nothing in it that changes unseen.
        return type(value), id(value), _value(vars(value), seen)
    raise NotComparable
