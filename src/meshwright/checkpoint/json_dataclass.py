"""Parse JSON into a frozen dataclass: every field present, none unknown, each of its declared type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwright.reading import shown

T = TypeVar("T")
Check = Callable[[Any], bool]


def read_dataclass(kind: type[T], values: Any) -> T:
    """Make a `kind` from a JSON object; ValueError or TypeError names the wrong field."""
    if type(values) is not dict:
        raise ValueError(f"{shown(values)} is not a {kind.__name__.lower()}")
    made = kind(**{name: tuple(value) if type(value) is list else value for name, value in values.items()})
    for name, fits in _checks(kind):  # type: ignore[arg-type]  # a class is hashable
        if not fits(getattr(made, name)):
            raise ValueError(f"{name} is {shown(values.get(name))}")
    return made


@cache
def _checks(kind: type) -> list[tuple[str, Check]]:
    """Checks by field. Cached: a manifest of a thousand ranks has a million chunks."""
    return [(name, _check(hint)) for name, hint in get_type_hints(kind).items()]


def _check(hint: Any) -> Check:
    origin, inner = get_origin(hint), [_check(one) for one in get_args(hint) if one is not ...]
    if hint is Any:
        return lambda value: True
    if origin in (Union, UnionType):
        return lambda value: any(fits(value) for fits in inner)
    if origin is tuple:
        return lambda value: type(value) is tuple and all(map(inner[0], value))
    if origin is Mapping:
        return lambda value: type(value) is dict and all(map(inner[1], value.values()))
    if hint is int:
        return lambda value: type(value) is int and -(2**63) <= value < 2**63  # the range of tensor and file sizes
    if hint is float:
        return lambda value: type(value) in (int, float)
    return lambda value: isinstance(value, hint)
