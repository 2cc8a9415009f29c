"""Caches that a model's code keeps outside of the model: those of `functools.cache`, and dicts of modules and classes.

A pass without values may leave its tensors there, such as a table of positions for a size. The next call would get
them, in a pass on tensors of another kind or in training.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.fake_tensors import FakeTensor, FunctionalTensor
from meshwright.torch_private.tensors import is_meta

_Cached = type(functools.cache(lambda: None))
_DEPTH = 4
"""From a cache to its table, an entry, a tuple that is kept, and a tensor in that."""
_known: list[Any] | None = None
"""The functions with caches, while a context is active: to look for them takes 60 ms."""


@contextmanager
def forgetting(model: nn.Module | None = None) -> Iterator[None]:
    """At the end, caches of functions, and dicts around a model's classes, forget tensors without values."""
    global _known
    outermost = _known is None
    if _known is None:
        _known = [found for found in gc.get_objects() if type(found) is _Cached and not _is_of_torch(found)]
    try:
        yield
    finally:
        for cached in _known:
            if cached.cache_info().currsize and _holds_valueless(cached, _DEPTH):
                cached.cache_clear()
        for table in _tables(model) if model is not None else ():
            for key in [key for key, value in table.items() if _is_valueless(value) or _holds_valueless(value, 2)]:
                del table[key]
        if outermost:
            _known = None


def _is_of_torch(cached: Any) -> bool:
    return str(getattr(cached, "__module__", "")).partition(".")[0] in ("torch", "meshwright", "sympy")


def _tables(model: nn.Module) -> list[dict[Any, Any]]:
    """The dicts among the variables of the classes of a model's modules, and of the files that define them."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not _is_of_torch(kind)}
    files = [sys.modules[name] for name in {kind.__module__ for kind in kinds} if name in sys.modules]
    places = [value for place in (*kinds, *files) for name, value in list(vars(place).items()) if name[:2] != "__"]
    return [value for value in places if type(value) is dict]


def _holds_valueless(holder: Any, depth: int) -> bool:
    if depth == 0 or isinstance(holder, torch.Tensor | type | nn.Module):
        return False
    for found in gc.get_referents(holder):
        if _is_valueless(found) or (_is_container(found) and _holds_valueless(found, depth - 1)):
            return True
    return False


def _is_container(found: Any) -> bool:
    return type(found) in (dict, list, tuple) or type(found).__name__ == "_lru_list_elem"


def _is_valueless(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and (isinstance(found, FakeTensor | FunctionalTensor) or is_meta(found))
