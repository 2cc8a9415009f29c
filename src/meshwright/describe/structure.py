"""Walk through batches of any structure: their containers, the names of their parts, and their tensors.

PyTorch's pytree covers lists, tuples, dicts and registered classes. This also covers dataclasses (frozen ones too),
mappings and sequences of any class. Any other object is a leaf. If it has tensors in its attributes, as a batch of
graphs does, they are found, and replaced in a copy of the object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.recording.loose_tensors import slots_of
from meshwright.torch_private.trees import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Parts:
    """The parts of a container."""

    names: tuple[str, ...]
    """How Python code accesses them: `["x"]`, `[0]`, `.x`."""
    values: list[Any]
    rebuild: Callable[[list[Any]], Any]
    """Makes a container of the same kind with other values."""


def parts_of(node: Any) -> Parts | None:
    """The parts of a container; None for anything else."""
    if isinstance(node, torch.Tensor | str | bytes):
        return None
    itself = id(
        node
    )  # tree_flatten leaves a cycle around `is_leaf`: with the node in it, tensors would outlive the step
    values, tree = tree_flatten(node, is_leaf=lambda other: id(other) != itself)
    if not (len(values) == 1 and values[0] is node):
        return Parts(_names(node, len(values)), values, lambda new: tree_unflatten(new, tree))
    if isinstance(node, Mapping):
        keys = list(node)
        return Parts(_names(node, len(keys)), [node[key] for key in keys], lambda new: _mapping(node, keys, new))
    if isinstance(node, MutableSequence) and not isinstance(node, bytearray):
        return Parts(_names(node, len(node)), list(node), lambda new: _sequence(node, new))
    if is_dataclass(node) and not isinstance(node, type):
        found = [field.name for field in fields(node) if hasattr(node, field.name)]
        values = [getattr(node, name) for name in found]
        return Parts(tuple(f".{name}" for name in found), values, lambda new: _object(node, found, new))
    return None


def _names(node: Any, length: int) -> tuple[str, ...]:
    if isinstance(node, Mapping) and len(node) == length:
        return tuple(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in node)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return tuple(f".{name}" for name in node._fields)
    return tuple(f"[{index}]" for index in range(length))


def _mapping(node: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> Any:
    new = dict(zip(keys, values, strict=True))
    if not isinstance(node, MutableMapping):
        return type(node)(new)  # type: ignore[call-arg]  # immutable mappings are built from a dict
    copied = copy.copy(node)
    for key, value in new.items():
        copied[key] = value
    return copied


def _sequence(node: MutableSequence[Any], values: list[Any]) -> Any:
    copied = copy.copy(node)
    copied[:] = values
    return copied


def _object(node: Any, names: list[str], values: list[Any]) -> Any:
    """A copy with other values. It avoids `__init__`, which may check or compute, and works for frozen classes."""
    copied = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(copied, name, value)
    return copied


def map_leaves(change: Callable[[Any], Any], node: Any) -> Any:
    """The same structure with every leaf changed."""
    parts = parts_of(node)
    return change(node) if parts is None else parts.rebuild([map_leaves(change, value) for value in parts.values])


def leaves_of(node: Any) -> list[Any]:
    """Everything that is not a container."""
    parts = parts_of(node)
    return [node] if parts is None else [leaf for value in parts.values for leaf in leaves_of(value)]


def map_tensors(change: Callable[[torch.Tensor], Any], node: Any) -> Any:
    """The same structure with every tensor changed, also those in objects."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        held = [(tensor, change(tensor)) for tensor in _held(leaf, set())]
        if all(old is new for old, new in held):
            return leaf
        return copy.deepcopy(leaf, {id(old): new for old, new in held})  # tensors in the memo are replaced, not copied

    return map_leaves(of_leaf, node)


def tensors_of(node: Any) -> list[torch.Tensor]:
    """Every tensor, also those in objects."""
    return list(_tensors(node, set()))


def _tensors(node: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif (parts := parts_of(node)) is None:
        yield from _held(node, seen)
    else:
        for value in parts.values:
            yield from _tensors(value, seen)


_NO_DATA = (type, FunctionType, MethodType, ModuleType, nn.Module, torch.device, torch.dtype, torch.Generator)


def _held(leaf: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors in an object's attributes."""
    if isinstance(leaf, _NO_DATA) or id(leaf) in seen:
        return
    seen.add(id(leaf))
    for value in [*getattr(leaf, "__dict__", {}).values(), *dict(slots_of(leaf)).values()]:
        yield from _tensors(value, seen)


def to_device(node: Any, device: torch.device) -> Any:
    """The same structure on a device. If an object has a `to` method, as a packed sequence does, that is used."""
    if isinstance(node, torch.Tensor):
        return node.to(device, non_blocking=True)
    if callable(getattr(type(node), "to", None)):
        return _moved(node, device)
    parts = parts_of(node)
    if parts is None:
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), node)
    return parts.rebuild([to_device(value, device) for value in parts.values])


def _moved(node: Any, device: torch.device) -> Any:
    try:
        moved = node.to(device, non_blocking=True)
    except TypeError:  # it accepts only a device
        moved = node.to(device)
    return node if moved is None else moved
