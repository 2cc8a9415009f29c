"""Caches that a model's code keeps outside of the model: those of `functools.cache`, and dicts of modules and classes.

A pass without values may leave its tensors there, such as a table of positions for a size. The next call would get
them, in a pass on tensors of another kind or in training.
"""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.fake_tensors import FakeTensor, FunctionalTensor
from meshwright.torch_private.tensors import is_meta

_Cached = type(functools.cache(lambda: None))
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "meshwright"})
"""Packages whose functions keep no tensors of a model."""
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_DEPTH = 4
"""From a cache to its table, an entry, a tuple that is kept, and a tensor in that."""


class _Functions:
    """The functions with caches in loaded modules, looked for again if more is imported."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._modules = -1
        self._of_libraries: dict[str, tuple[ModuleType, int, list[Any]]] = {}
        """By a library's module: it, the number of its variables then, and its functions."""
        self.users = 0
        self.cleared: set[Any] = set()

    def find(self) -> list[Any]:
        if self._modules != len(sys.modules):
            self._found = [cached for name, module in _modules() for cached in self._inside(name, module)]
            self._modules = len(sys.modules)
        return self._found

    def _inside(self, name: str, module: ModuleType) -> list[Any]:
        """A user's module is looked through every time, a library's if it has more variables than before."""
        size = len(vars(module))
        known = self._of_libraries.get(name)
        if known is not None and known[0] is module and known[1] == size:
            return known[2]
        found = list(_cached_functions(name, module))
        if str(vars(module).get("__file__")).startswith(_LIBRARIES):
            self._of_libraries[name] = module, size, found
        return found

    def forget(self) -> None:
        self._found, self._modules, self.cleared = [], -1, set()


_functions = _Functions()


@contextmanager
def forgetting(model: nn.Module | None = None) -> Iterator[None]:
    """At the end, caches of functions, and dicts around a model's classes, forget tensors without values.

    They keep those that they had before: a dict one by one, a cache unless something was added to it.
    """
    _functions.users += 1
    before = {cached: cached.cache_info().misses for cached in _functions.find()}
    own = [(table, _valueless_keys(table)) for table in _tables(model)]
    try:
        yield
    finally:
        for cached in _functions.find():
            size = cached.cache_info()
            changed = size.misses != before.get(cached, 0) or cached in _functions.cleared
            if size.currsize and changed and _holds_valueless(cached, _DEPTH):
                cached.cache_clear()
                _functions.cleared.add(cached)
        for table, kept in own:
            for key in _valueless_keys(table) - kept:
                del table[key]
        _functions.users -= 1
        if not _functions.users:
            _functions.forget()


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _OTHERS and issubclass(type(module), ModuleType):
            yield name, module


def _cached_functions(name: str, module: ModuleType) -> Iterator[Any]:
    """Cached functions among the variables of a module and of its classes, or inside functions around them.

    Nothing is asked of other objects, not even their class: a lazy one would import something, or fail.
    """
    for value in list(vars(module).values()):
        yield from _within(value)
        if issubclass(type(value), type) and value.__module__ == name:
            for attribute in list(vars(value).values()):
                is_wrapped = type(attribute) in (staticmethod, classmethod)
                yield from _within(attribute.__func__ if is_wrapped else attribute)


def _within(value: Any) -> Iterator[Any]:
    if type(value) is _Cached:
        yield value
    elif type(value) is FunctionType and value.__closure__:
        for cell in value.__closure__:
            with suppress(ValueError):  # it is empty
                if type(cell.cell_contents) is _Cached:
                    yield cell.cell_contents


def _valueless_keys(table: dict[Any, Any]) -> set[Any]:
    return {key for key, value in table.items() if _is_valueless(value) or _holds_valueless(value, 2)}


def _tables(model: nn.Module | None) -> list[dict[Any, Any]]:
    """The dicts among the variables of the classes of a model's modules, and of the files that define them."""
    kinds = {
        kind
        for module in (model.modules() if model is not None else ())
        for kind in type(module).__mro__
        if str(kind.__module__).partition(".")[0] not in _OTHERS
    }
    files = [sys.modules[name] for name in {kind.__module__ for kind in kinds} if name in sys.modules]
    places = [value for place in (*kinds, *files) for name, value in list(vars(place).items()) if name[:2] != "__"]
    return [value for value in places if type(value) is dict]


def _holds_valueless(holder: Any, depth: int) -> bool:
    if depth == 0 or issubclass(type(holder), torch.Tensor | type | nn.Module):
        return False
    for found in gc.get_referents(holder):
        if _is_valueless(found) or (_is_container(found) and _holds_valueless(found, depth - 1)):
            return True
    return False


def _is_container(found: Any) -> bool:
    return type(found) in (dict, list, tuple) or type(found).__name__ == "_lru_list_elem"


def _is_valueless(found: Any) -> bool:
    return issubclass(type(found), torch.Tensor) and (
        isinstance(found, FakeTensor | FunctionalTensor) or is_meta(found)
    )
