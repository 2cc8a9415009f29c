"""What makes two blocks equal: comparable keys, and layer numbers that may differ if a block does not use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.modules import REGISTERED
from meshwright.torch_private.tensors import storage_id

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, Enum)
SAME = (FunctionType, BuiltinFunctionType, type, torch.Tensor, nn.Module)
"""Classes whose objects are equal only if they are the same object."""


class NotComparable(Exception):
    """A value cannot be compared, so it counts as different."""


def kind_of(block: nn.Module, *, numbered: bool = False) -> Any:
    """A key that is equal for blocks with the same modules, parameter and buffer layouts, and attributes.

    With `numbered`, integer attributes may differ.
    """
    return _layout_of(block), state_of(block, numbered=numbered)


def cost_keys(blocks: Sequence[nn.Module]) -> list[Any]:
    """A key for each block, equal for those that cost the same.

    They print alike and have the same switches. Numbers and words that nearly all of them have for themselves tell the
    layers apart, and of other numbers with a fraction, as that of dropped paths, it only matters whether they are 0.
    """
    printed = [(_layout_of(block), tuple(module.extra_repr() for module in block.modules())) for block in blocks]
    alike: dict[Any, list[int]] = {}
    for place, key in enumerate(printed):
        alike.setdefault(key, []).append(place)
    keys: list[Any] = [None] * len(blocks)
    for key, places in alike.items():
        switches = [_switches(blocks[place]) for place in places]
        values = {name: {own.get(name) for own in switches} for own in switches for name in own}
        most = max(_FEW, len(places) // 3)
        shared = [name for name in values if len(values[name]) <= most]
        for place, own in zip(places, switches, strict=True):
            keys[place] = key, tuple((name, own.get(name)) for name in shared)
    return keys


_FEW = 2


def _switches(block: nn.Module) -> dict[tuple[str, str], Any]:
    """The plain attributes of a block's modules, by module in the block and name."""
    return {
        (name, key): value if type(value) is not float else bool(value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if key not in REGISTERED and type(value) in (bool, int, float, str, type(None))
    }


def _layout_of(block: nn.Module) -> Any:
    numbers: dict[int, int] = {}  # what is tied inside one block must be tied in the other

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
    """A key of all attributes of a block and its modules. It changes when any of them is set or added."""
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
    """The integer attributes, by module in the block and name."""
    return {
        (name, key): value
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if type(value) is int
    }


def arrival_of(value: Any, tensors: list[torch.Tensor], other: Callable[[Any], Any] | None = None) -> Any:
    """A key that is equal for inputs of the same layout. Their tensors are appended to `tensors` in order.

    For values that cannot be compared, `other` makes the key; without it, `NotComparable` is raised.
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
    """The global state that a call depends on: gradient mode, inference mode and autocast."""
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
    seen[id(value)] = id(value)  # in case the object contains itself
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
        # An object that blocks share, such as a config: it must be the same object with the same content.
        return type(value), id(value), _value(vars(value), seen)
    raise NotComparable


_MADE_BY_CLASS = ("__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__doc__")


class LayerIndex:
    """Behaves like an int and remembers whether its value was used in any way.

    It is no subclass of int, because C code reads the value of those directly.
    """

    __slots__ = ("_value", "used")

    def __init__(self, value: int) -> None:
        self._value, self.used = value, False

    def __getattr__(self, name: str) -> Any:
        self.used = True
        return getattr(self._value, name)

    @property  # type: ignore[misc]  # read-only here; `isinstance` reads it
    def __class__(self) -> type:
        self.used = True
        return int


def _using(name: str) -> Any:
    def use(self: LayerIndex, *args: Any) -> Any:
        self.used = True
        return getattr(self._value, name)(*args)

    return use


for _name in (name for name in dir(int) if name.startswith("__") and name not in _MADE_BY_CLASS):
    setattr(LayerIndex, _name, _using(_name))


@contextmanager
def layer_indices(block: nn.Module, places: Iterable[tuple[str, str]]) -> Iterator[list[LayerIndex]]:
    """While active, a `LayerIndex` replaces each of these attributes (module in the block, name)."""
    attributes = [(vars(block.get_submodule(module)), name) for module, name in places]
    numbers = [LayerIndex(values[name]) for values, name in attributes]
    for (values, name), number in zip(attributes, numbers, strict=True):
        values[name] = number
    try:
        yield numbers
    finally:
        for (values, name), number in zip(attributes, numbers, strict=True):
            if values.get(name) is number:
                values[name] = number._value
