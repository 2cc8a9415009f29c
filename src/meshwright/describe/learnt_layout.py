"""Learn where the samples are in a batch: make batches of several sizes and compare them.

A tensor dim or a list whose length always equals the number of samples runs over the samples. A value that is the same
in all batches belongs to no sample. Anything else (the tokens of all samples in one row, a sum over samples) is unknown
and is refused by name where a batch must be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from meshwright.describe.batch_layout import Container, Graphs, Layout, Listed, Nested, Number, Rows, Shared, Unknown
from meshwright.describe.structure import parts_of, tensors_of

Draws = Sequence[tuple[int, Any]]
"""Pairs of a number of samples and a batch of that size."""


def learn_layout(draws: Draws, path: str = "batch") -> Layout:
    """Where the samples are in batches like these. There must be several sizes, and one size more than once."""
    values = [value for _, value in draws]
    first = values[0]
    if len({type(value) for value in values}) > 1:
        types = " and ".join(sorted({type(value).__name__ for value in values}))
        return Unknown(path, f"has different types in different batches ({types})")
    if isinstance(first, torch.Tensor) and first.is_nested:
        return Nested(path) if _count(draws, lambda value: value.size(0)) else _odd(path)
    if isinstance(first, torch.Tensor | numpy.ndarray):
        return _of_arrays(draws, path)
    if callable(getattr(first, "to_data_list", None)) and hasattr(type(first), "from_data_list"):
        return _of_graphs(draws, path)
    parts = [parts_of(value) for value in values]
    held = [part for part in parts if part is not None]
    if len(held) < len(draws):
        return _of_others(draws, path)
    if isinstance(first, Sequence) and not hasattr(first, "_fields") and _count(draws, len):
        return Listed(path)
    if any(part.names != held[0].names for part in held):
        return Unknown(path, "holds different values in different batches, by number or by name")
    columns = zip(held[0].names, *(part.values for part in held), strict=True)
    sizes = [samples for samples, _ in draws]
    found = [learn_layout(list(zip(sizes, column, strict=True)), path + name) for name, *column in columns]
    return Container(path, held[0].names, tuple(found))


def _count(draws: Draws, size: Any) -> bool:
    """Whether `size(value)` is always the number of samples."""
    return all(size(value) == samples for samples, value in draws)


def _odd(path: str) -> Unknown:
    return Unknown(path, "does not have a size that is always the number of samples")


def _of_arrays(draws: Draws, path: str) -> Layout:
    values = [value for _, value in draws]
    if len({len(value.shape) for value in values}) > 1:
        return Unknown(path, "has different numbers of dims in different batches")
    dims = [dim for dim in range(len(values[0].shape)) if _count(draws, lambda value, dim=dim: value.shape[dim])]
    if len(dims) == 1:
        return Rows(path, dims[0])
    if dims:
        return Unknown(path, f"has {len(dims)} dims whose size is the number of samples")
    if len({tuple(value.shape) for value in values}) > 1:
        return _odd(path)
    if all(_alike(values[0], value) for value in values):
        return Shared(path)
    if values[0].shape in ((), (1,)) and _is_multiple([(samples, value.item()) for samples, value in draws]):
        return Number(path)
    return Unknown(path, "has the same shape but different values in every batch")


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, numpy.ndarray):
        return numpy.array_equal(left, right)
    if left.device.type == "meta" or type(left) is not torch.Tensor:  # a tensor without values
        return True
    return left.dtype == right.dtype and torch.equal(left, right)


def _is_multiple(draws: Draws) -> bool:
    samples, value = draws[0]
    return value != 0 and all(other * samples == value * count for count, other in draws)


def _of_graphs(draws: Draws, path: str) -> Layout:
    found = Graphs(path)
    if not _count(draws, found.count):
        return _odd(path)
    _, value = draws[-1]
    again = found.joined([value])
    pairs = list(zip(tensors_of(value), tensors_of(again), strict=False))
    if len(tensors_of(value)) != len(tensors_of(again)) or not all(_alike(*pair) for pair in pairs):
        return Unknown(path, "is not restored by from_data_list(to_data_list())")
    return found


def _of_others(draws: Draws, path: str) -> Layout:
    """Numbers, strings and objects."""
    values = [value for _, value in draws]
    if not tensors_of(values) and all(_equal(values[0], value) for value in values):
        return Shared(path)
    if isinstance(values[0], bool) or not isinstance(values[0], int | float):
        return Unknown(path, f"is {_kind(values[0])} that differs between batches")
    return Number(path) if _is_multiple(draws) else Unknown(path, "is a number that differs between batches")


def _equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except Exception:  # a class with another kind of comparison
        return False


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
