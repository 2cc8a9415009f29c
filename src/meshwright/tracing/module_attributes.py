"""Tensors that modules hold as plain attributes: a compiled graph takes them as inputs and returns those that are set.

Models keep tables of positions so, caches that the first call fills, or a loss that the model's caller reads later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.torch_private.trees import TreeSpec, tree_flatten, tree_unflatten

_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module, such as its parameters and hooks."""
_TENSOR = object()


@dataclass(frozen=True, eq=False)
class Attribute:
    """A module's attribute that is a tensor, or a list, tuple or dict with tensors."""

    module: str
    name: str
    tree: TreeSpec
    others: tuple[Any, ...]
    """Its leaves, with `_TENSOR` in place of tensors."""

    def set(self, root: nn.Module, tensors: Iterator[Tensor]) -> None:
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.others]
        vars(root.get_submodule(self.module))[self.name] = tree_unflatten(leaves, self.tree)

    @property
    def count(self) -> int:
        """How many tensors it holds."""
        return sum(leaf is _TENSOR for leaf in self.others)

    @property
    def layout(self) -> Any:
        return self.module, self.name, self.tree, tuple(map(repr, self.others))


def tensor_attributes(root: nn.Module | None) -> dict[Attribute, list[Tensor]]:
    """The attributes of a module and of those within it, with their tensors."""
    found = {}
    for path, module in root.named_modules() if root is not None else ():
        for name, value in vars(module).items():
            if name in _OWN or not isinstance(value, Tensor | list | tuple | dict):
                continue
            leaves, tree = tree_flatten(value)
            if tensors := [leaf for leaf in leaves if isinstance(leaf, Tensor)]:
                others = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
                found[Attribute(path, name, tree, others)] = tensors
    return found


def lasting(attributes: dict[Attribute, list[Tensor]]) -> dict[Attribute, list[Tensor]]:
    """Those that a step may read: results of the step before, with their graph, are only waiting to be replaced."""
    return {name: tensors for name, tensors in attributes.items() if all(tensor.is_leaf for tensor in tensors)}


@contextmanager
def attributes_lent(root: nn.Module, lent: list[tuple[Attribute, list[Tensor]]]) -> Iterator[Changes]:
    """Inside, attributes have the given tensors; afterwards all attributes with tensors are as they were."""
    before = [(module, dict(vars(module))) for module in root.modules()]
    try:
        for attribute, tensors in lent:
            attribute.set(root, iter(tensors))
        yield Changes(root)
    finally:
        for attribute in tensor_attributes(root):
            vars(root.get_submodule(attribute.module)).pop(attribute.name)
        for module, attributes in before:
            vars(module).update({name: value for name, value in attributes.items() if name not in vars(module)})


class Changes:
    """Tells which attributes of a module have other tensors than when this was made."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known = {attribute.layout: tensors for attribute, tensors in tensor_attributes(root).items()}

    def __call__(self) -> dict[Attribute, list[Tensor]]:
        return {
            name: tensors for name, tensors in tensor_attributes(self._root).items() if self._are_new(name, tensors)
        }

    def _are_new(self, attribute: Attribute, tensors: list[Tensor]) -> bool:
        before = self._known.get(attribute.layout)
        return before is None or any(one is not other for one, other in zip(before, tensors, strict=True))
