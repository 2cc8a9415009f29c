"""What an object is now, as conditions on it later.

Simple values and containers of them are compared by value. Other objects are compared by identity, and with all that
they hold: their attributes, what a bound method or a `functools.partial` is bound to, and what their class defines.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from logging import Logger
from operator import getitem, is_
from types import BuiltinFunctionType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshwright.strategies.tensor.record import Unrecordable
from meshwright.torch_private.modules import HOOKS, OTHER_ATTRIBUTES, REGISTERED

_LIBRARIES = sys.stdlib_module_names
_SIMPLE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size),
)
FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, property)
CACHED = type(lru_cache(lambda: None))
"""A function whose results are cached."""
_WITHOUT_STATE = (Logger, re.Pattern, CACHED, ContextVar, GenericAlias, TypeVar)
"""Objects that decide nothing, or whose reads are seen as calls."""
DEEPEST = 4
"""Levels of objects in objects that are compared."""

Check = tuple[str, Any]
"""A template over `{}`, the expression that reads a value, and the constant that it compares with."""


def checks_of(value: Any, depth: int = 0) -> Iterator[Check]:
    """Expressions that are true while a value is what it is now. `{0}` reads it and `{1}` is the constant."""
    kind = type(value)
    if value is None or kind is bool:
        yield "{0} is {1}", value
    elif kind in _SIMPLE or isinstance(value, enum.Enum):
        yield "({0} is {1} or ({0}.__class__ is {1}.__class__ and {0} == {1}))", value
    elif isinstance(value, (*FIXED, Tensor, *_WITHOUT_STATE)):
        yield "{0} is {1}", value
    elif kind in (tuple, list, dict, set, frozenset) and is_comparable(value):
        yield "{0} == {1}", copied(value)
    elif depth >= DEEPEST:
        raise Unrecordable(f"it holds a {kind.__name__} that cannot be compared")
    elif isinstance(value, MethodType):
        yield "{0} is {1}", value
        yield from _inner("{0}.__self__", value.__self__, depth)
    elif isinstance(value, partial):
        yield "{0} is {1}", value
        if not _is_ours(value.func):
            for name in ("func", "args", "keywords"):
                yield from _inner(f"{{0}}.{name}", getattr(value, name), depth)
    elif isinstance(value, nn.Module):
        yield "{0} is {1}", value
        if of_class := class_state(kind):
            yield "{1}.same()", of_class
        yield "len({0}.__dict__) == {1}", len(vars(value))
        yield from _checks_of_items("{0}.__dict__", _settings(value), depth)
    elif isinstance(value, tuple | list | dict):
        yield "{0} is {1}", value
        yield "len({0}) == {1}", len(value)
        yield from _checks_of_items("{0}", value if isinstance(value, dict) else dict(enumerate(value)), depth)
        if kind not in (tuple, list, dict):
            yield from _checks_of_object(value, depth)
    elif hasattr(value, "__dict__"):
        yield "{0} is {1}", value
        yield from _checks_of_object(value, depth)
    else:
        raise Unrecordable(f"it holds a {kind.__name__} that cannot be compared")


def _is_ours(function: Any) -> bool:
    return getattr(function, "__module__", "").partition(".")[0] == "meshwright"


def _checks_of_object(value: Any, depth: int) -> Iterator[Check]:
    """The attributes of an object and its class."""
    if of_class := class_state(type(value)):
        yield "{1}.same()", of_class
    own = getattr(value, "__dict__", {})
    if is_comparable(own):
        yield "{1}.same({0}.__dict__)", _shared(type(value), own)
    else:
        yield "len({0}.__dict__) == {1}", len(own)
        yield from _checks_of_items("{0}.__dict__", own, depth)


def _settings(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that is no part of the block, which may read them. Running it is not recorded."""
    skipped = (*HOOKS, *OTHER_ATTRIBUTES, *REGISTERED)
    return {name: value for name, value in vars(module).items() if name not in skipped}


def _checks_of_items(place: str, items: Mapping[Any, Any], depth: int) -> Iterator[Check]:
    for number, (key, item) in enumerate(items.items()):
        named = type(key) in (str, int)
        yield from _inner(f"{place}[{key!r}]" if named else f"[*{place}.values()][{number}]", item, depth)


def _inner(place: str, item: Any, depth: int) -> Iterator[Check]:
    for text, constant in checks_of(item, depth + 1):
        yield text.replace("{0}", place), constant


@dataclass(frozen=True, eq=False)
class ObjectState:
    """The attributes of an object, simple values and containers of them."""

    names: list[str]
    values: list[Any]
    containers: list[str]
    """The names of the containers among them."""
    copies: list[Any]
    """What is in the containers now."""

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> ObjectState:
        kept = {name: copied(value) for name, value in attributes.items()}
        containers = [name for name, value in attributes.items() if kept[name] is not value]
        return cls([*attributes], [*attributes.values()], containers, [kept[name] for name in containers])

    def is_of(self, now: Mapping[str, Any]) -> bool:
        """Whether attributes are these very objects in their state of then, as in all calls but few."""
        if [*now] != self.names or not all(map(is_, now.values(), self.values)):
            return False
        return [*map(now.__getitem__, self.containers)] == self.copies

    def same(self, now: Mapping[str, Any]) -> bool:
        """It raises KeyError if one is missing."""
        if self.is_of(now):
            return True
        kept = dict(zip(self.names, self.values, strict=True)) | dict(zip(self.containers, self.copies, strict=True))
        return len(now) == len(kept) and all(_is_equal(now[name], value) for name, value in kept.items())


def _is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


_latest: WeakKeyDictionary[type, ObjectState] = WeakKeyDictionary()


def _shared(kind: type, attributes: Mapping[str, Any]) -> ObjectState:
    """An object's state, or the latest equal one: what all blocks compare with, as their config, stays in caches."""
    known = _latest.get(kind)
    if known is None or not known.is_of(attributes):
        known = _latest[kind] = ObjectState.of(attributes)
    return known


@dataclass(frozen=True, eq=False)
class ClassState:
    """Settings that objects of a class share."""

    sizes: list[int]
    """How much each of `classes` defines: another attribute may hide that of a base."""
    classes: list[Mapping[str, Any]]
    """The attributes of the class and its bases."""
    spaces: tuple[Any, ...]
    """Those of the class or base that has each setting."""
    names: tuple[str, ...]
    values: tuple[Any, ...]

    def same(self) -> bool:
        """It raises KeyError if one is missing."""
        return (*map(getitem, self.spaces, self.names),) == self.values and [*map(len, self.classes)] == self.sizes

    def is_like(self, other: ClassState) -> bool:
        return (self.sizes, self.names, self.values) == (other.sizes, other.names, other.values)


_latest_classes: WeakKeyDictionary[type, ClassState] = WeakKeyDictionary()


def class_state(cls: type) -> ClassState | None:
    """The comparable attributes of a class and its bases; None for classes of Python and torch."""
    own = [one for one in cls.__mro__ if one.__module__.partition(".")[0] not in ("builtins", "torch", *_LIBRARIES)]
    if not own:
        return None
    found = [
        (vars(one), name, copied(value))
        for one in own
        for name, value in vars(one).items()
        if not name.startswith("__") and not isinstance(value, FIXED) and is_comparable(value)
    ]
    spaces, names, values = zip(*found, strict=True) if found else ((), (), ())
    classes: list[Mapping[str, Any]] = [vars(one) for one in own]
    made = ClassState([*map(len, classes)], classes, spaces, names, values)
    known = _latest_classes.get(cls)  # shared, as the state of objects is
    if known is None or not known.is_like(made):
        known = _latest_classes[cls] = made
    return known


def is_comparable(value: Any) -> bool:
    """Whether a value consists of plain containers and simple values, so that `==` compares all of it."""
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, (enum.Enum, *FIXED)):
        return True
    if kind in (tuple, list, set, frozenset):
        return all(map(is_comparable, value))
    return kind is dict and all(map(is_comparable, value)) and all(map(is_comparable, value.values()))


def copied(value: Any) -> Any:
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return kind(map(copied, value))
    return {key: copied(item) for key, item in value.items()} if kind is dict else value
