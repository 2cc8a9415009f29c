"""Find out whether a block uses its own number, such as `self.layer_idx`. If not, it may differ between like blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

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
