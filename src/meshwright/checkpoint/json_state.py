"""Encode small state (a schedule's, a group's hyperparameters) as JSON and back, exactly. Decoding runs no code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch

from meshwright.errors import CheckpointError


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


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
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
