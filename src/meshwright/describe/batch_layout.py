"""Where the samples lie in a batch, learnt by experiment: batches of several sizes are made and compared.

A dim of a tensor that always has as many entries as there are samples counts them, and so does the length of a list.
What is alike in all batches belongs to no sample. Anything else (the tokens of all samples in one row, a sum over
samples) cannot be known, and is refused by name where a batch must be cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from meshwright.describe.structure import Parts, parts_of, tensors_of
from meshwright.errors import JobError

Draws = Sequence[tuple[int, Any]]
"""Batches with their numbers of samples."""


class CannotCut(JobError):
    """A batch, or a part of it, cannot be cut into samples."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} {why}, so how it is cut by samples cannot be known. Give Job(split=...), the inverse of "
            "Job(collate=...): from a batch to the list of its samples."
        )


@dataclass(frozen=True)
class Layout(ABC):
    """Where samples lie in one value of a batch."""

    path: str

    def count(self, value: Any) -> int | None:
        """Samples in it; None where it does not tell."""
        return None

    @abstractmethod
    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        """Some of its samples, of which there are `samples`."""

    @abstractmethod
    def turned(self, value: Any) -> Any:
        """The same samples, last first."""

    @abstractmethod
    def joined(self, values: list[Any]) -> Any:
        """Batches one after another: the inverse of `take`."""

    def grown(self, value: Any, length: int, samples: int) -> Any:
        """Its first sample, so many times over."""
        return self.joined([self.take(value, 0, 1, samples)] * length)

    def unknown(self) -> Unknown | None:
        """The first part of it that cannot be cut."""
        return None


class Shared(Layout):
    """The same in every batch: kept whole."""

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        return value

    def turned(self, value: Any) -> Any:
        return value

    def joined(self, values: list[Any]) -> Any:
        return values[0]


@dataclass(frozen=True)
class Rows(Layout):
    """An array one dim of which counts samples."""

    dim: int

    def count(self, value: Any) -> int:
        return int(value.shape[self.dim])

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        if isinstance(value, numpy.ndarray):
            return value[(slice(None),) * self.dim + (slice(first, first + length),)]
        if value.layout is torch.strided:
            return value.narrow(self.dim, first, length)
        return value.index_select(self.dim, torch.arange(first, first + length, device=value.device))

    def turned(self, value: Any) -> Any:
        if isinstance(value, numpy.ndarray):
            return numpy.flip(value, self.dim)
        return value.index_select(self.dim, torch.arange(self.count(value) - 1, -1, -1, device=value.device))

    def joined(self, values: list[Any]) -> Any:
        shapes = {tuple(size for dim, size in enumerate(value.shape) if dim != self.dim) for value in values}
        if len(shapes) > 1:
            raise JobError(
                f"{self.path} is to be joined from parts of other shapes ({' and '.join(map(str, sorted(shapes)))}); "
                "pad every part to one length."
            )
        join: Any = numpy.concatenate if isinstance(values[0], numpy.ndarray) else torch.cat
        return join(values, self.dim)

    def grown(self, value: Any, length: int, samples: int) -> Any:
        """Without memory for it."""
        if isinstance(value, numpy.ndarray):
            return super().grown(value, length, samples)
        return value.narrow(self.dim, 0, 1).expand([length if d == self.dim else -1 for d in range(value.dim())])


class Number(Layout):
    """A number that is some times the samples, as a `batch_size` is."""

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        if isinstance(value, torch.Tensor):
            return (value * length / samples).to(value.dtype)
        return type(value)(value * length / samples)

    def turned(self, value: Any) -> Any:
        return value

    def joined(self, values: list[Any]) -> Any:
        return sum(values[1:], start=values[0])


class Listed(Layout):
    """A list or tuple with an entry for each sample, or a nested tensor."""

    def count(self, value: Any) -> int:
        return len(self._list(value))

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        return self._rebuilt(value, self._list(value)[first : first + length])

    def turned(self, value: Any) -> Any:
        return self._rebuilt(value, self._list(value)[::-1])

    def joined(self, values: list[Any]) -> Any:
        return self._rebuilt(values[0], [sample for value in values for sample in self._list(value)])

    def _list(self, value: Any) -> list[Any]:
        return list(value)

    def _rebuilt(self, value: Any, samples: list[Any]) -> Any:
        parts = parts_of(value)
        return type(value)(samples) if isinstance(value, list | tuple) or parts is None else parts.rebuild(samples)


class Nested(Listed):
    """A nested tensor, which has a tensor for each sample."""

    def _list(self, value: Any) -> list[Any]:
        return list(value.unbind())

    def _rebuilt(self, value: Any, samples: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(samples, layout=value.layout)


class Graphs(Listed):
    """An object that gives its samples by `to_data_list` and is made from them by `from_data_list`."""

    def _list(self, value: Any) -> list[Any]:
        return list(value.to_data_list())

    def _rebuilt(self, value: Any, samples: list[Any]) -> Any:
        # A class that was derived for the batch at hand would derive another one from itself each time.
        owner: Any = next(kind for kind in type(value).__mro__ if "from_data_list" in vars(kind))
        return owner.from_data_list(samples)


@dataclass(frozen=True)
class Unknown(Layout):
    """What cannot be cut, and why."""

    why: str

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        raise CannotCut(self.path, self.why)

    def turned(self, value: Any) -> Any:
        raise CannotCut(self.path, self.why)

    def joined(self, values: list[Any]) -> Any:
        raise CannotCut(self.path, self.why)

    def unknown(self) -> Unknown:
        return self


@dataclass(frozen=True)
class Container(Layout):
    """Values under names that are the same in every batch."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]

    def count(self, value: Any) -> int | None:
        """Samples in it. All parts that tell must tell the same."""
        pairs = zip(self.layouts, self._parts(value).values, strict=True)
        found = [(layout.path, count) for layout, part in pairs if (count := layout.count(part)) is not None]
        for path, count in found[1:]:
            if count != found[0][1]:
                raise JobError(f"{found[0][0]} holds {found[0][1]} samples, but {path} holds {count}.")
        return found[0][1] if found else None

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        parts = self._parts(value)
        pairs = zip(self.layouts, parts.values, strict=True)
        return parts.rebuild([layout.take(part, first, length, samples) for layout, part in pairs])

    def turned(self, value: Any) -> Any:
        parts = self._parts(value)
        pairs = zip(self.layouts, parts.values, strict=True)
        return parts.rebuild([layout.turned(part) for layout, part in pairs])

    def joined(self, values: list[Any]) -> Any:
        held = [self._parts(value) for value in values]
        columns = zip(*(parts.values for parts in held), strict=True)
        joined = [layout.joined(list(column)) for layout, column in zip(self.layouts, columns, strict=True)]
        return held[0].rebuild(joined)

    def grown(self, value: Any, length: int, samples: int) -> Any:
        parts = self._parts(value)
        pairs = zip(self.layouts, parts.values, strict=True)
        return parts.rebuild([layout.grown(part, length, samples) for layout, part in pairs])

    def unknown(self) -> Unknown | None:
        return next((found for layout in self.layouts if (found := layout.unknown()) is not None), None)

    def _parts(self, value: Any) -> Parts:
        parts = parts_of(value)
        if parts is None or parts.names != self.names:
            names = "nothing" if parts is None else ", ".join(parts.names)
            why = f"holds {names}, where batches that the job made held {', '.join(self.names)}"
            raise CannotCut(self.path, why)
        return parts


def learn(draws: Draws, path: str = "batch") -> Layout:
    """Where samples lie in batches like these, which must be of several sizes, and of one size more than once."""
    values = [value for _, value in draws]
    first = values[0]
    if len({type(value) for value in values}) > 1:
        return Unknown(path, f"is of another type in another batch ({_types(values)})")
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
    if _is_list(first) and _count(draws, len):
        return Listed(path)
    if any(part.names != held[0].names for part in held):
        return Unknown(path, "holds another number of values, or under other names, in another batch")
    columns = zip(held[0].names, *(part.values for part in held), strict=True)
    sizes = [samples for samples, _ in draws]
    found = [learn(list(zip(sizes, column, strict=True)), path + name) for name, *column in columns]
    return Container(path, held[0].names, tuple(found))


def _types(values: list[Any]) -> str:
    return " and ".join(sorted({type(value).__name__ for value in values}))


def _count(draws: Draws, size: Any) -> bool:
    """Whether some size of a value is always the number of samples."""
    return all(size(value) == samples for samples, value in draws)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not hasattr(value, "_fields")


def _odd(path: str) -> Unknown:
    return Unknown(path, "does not have a size that is always the number of samples")


def _of_arrays(draws: Draws, path: str) -> Layout:
    values = [value for _, value in draws]
    if len({len(value.shape) for value in values}) > 1:
        return Unknown(path, "has another number of dims in another batch")
    dims = [dim for dim in range(len(values[0].shape)) if _count(draws, lambda value, dim=dim: value.shape[dim])]
    if len(dims) == 1:
        return Rows(path, dims[0])
    if dims:
        return Unknown(path, f"has {len(dims)} dims that count samples")
    if len({tuple(value.shape) for value in values}) > 1:
        return _odd(path)
    if all(_alike(values[0], value) for value in values):
        return Shared(path)
    if values[0].shape in ((), (1,)) and _is_multiple([(samples, value.item()) for samples, value in draws]):
        return Number(path)
    return Unknown(path, "has the same shape and other values in every batch")


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, numpy.ndarray):
        return numpy.array_equal(left, right)
    if left.device.type == "meta" or type(left) is not torch.Tensor:  # it has no values
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
        return Unknown(path, "is not what its from_data_list makes of its to_data_list")
    return found


def _of_others(draws: Draws, path: str) -> Layout:
    """Numbers, strings and objects."""
    values = [value for _, value in draws]
    if not tensors_of(values) and all(_equal(values[0], value) for value in values):
        return Shared(path)
    if isinstance(values[0], bool) or not isinstance(values[0], int | float):
        return Unknown(path, f"is {_kind(values[0])}, another one in every batch")
    return Number(path) if _is_multiple(draws) else Unknown(path, "is a number, another one in every batch")


def _equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except Exception:  # of a class that compares otherwise
        return False


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
