"""Small state (a schedule's, a group's hyperparameters) as JSON and back, exactly, and JSON as checked dataclasses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.reading import shown

T = TypeVar("T")
Check = Callable[[Any], bool]


def encode(value: Any, where: str) -> Any:
    """The value as JSON; `where` names it in an error."""
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}  # JSON has no such number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if torch.is_tensor(value) and value.numel() == 1:
        return {"tensor": encode(value.tolist(), where), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, where) for item in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]}
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}, which a checkpoint cannot store; "
        "numbers, strings, lists, tuples and dicts can be stored."
    )


def encode_optimizer(optimizer: Optimizer, names: list[list[str]], values: list[dict[str, Any]]) -> dict[str, Any]:
    """An optimizer's class, and for each group the names of its parameters and its hyperparameters."""
    encoded = [encode(value, "The optimizer's group") for value in values]
    groups = [{"names": own, "values": value} for own, value in zip(names, encoded, strict=True)]
    return {"class": type(optimizer).__name__, "groups": groups}


def decode(value: Any) -> Any:
    """The inverse of `encode`. Runs no code."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind == "float":
        return float(value["float"])
    if kind == "tensor":
        return torch.tensor(decode(value["tensor"]), dtype=getattr(torch, value["dtype"]))
    items = [decode(item) for item in value[kind]]
    if kind == "tuple":
        return tuple(items)
    pairs = {tuple(key) if isinstance(key, list) else key: item for key, item in items}
    return Counter(pairs) if kind == "counter" else pairs


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
