"""Where the samples are in a batch, and how each kind of value is counted, cut and joined.

`describe/learnt_layout.py` finds the layout of a job's batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from meshwright.describe.structure import Parts, parts_of
from meshwright.errors import JobError


class CannotCut(JobError):
    """A batch, or a part of it, cannot be cut into samples."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} {why}, so it cannot be cut into samples. Give Job(split=...), the inverse of "
            "Job(collate=...): from a batch to the list of its samples."
        )


@dataclass(frozen=True)
class Layout(ABC):
    """Where the samples are in one value of a batch."""

    path: str

    def count(self, value: Any) -> int | None:
        """The number of samples in a value; None if it cannot be told from the value."""
        return None

    @abstractmethod
    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        """`length` samples from `first` on, of a value that has `samples`."""

    def turned(self, value: Any) -> Any:
        """The same samples in reverse order."""
        return value

    @abstractmethod
    def joined(self, values: list[Any]) -> Any:
        """The values of several batches joined into one: the inverse of `take`."""

    def grown(self, value: Any, length: int, samples: int) -> Any:
        """The first sample repeated `length` times."""
        return self.joined([self.take(value, 0, 1, samples)] * length)

    def unknown(self) -> Unknown | None:
        """The first part that cannot be cut."""
        return None


class Shared(Layout):
    """A value that is the same in every batch and is kept whole."""

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        return value

    def joined(self, values: list[Any]) -> Any:
        return values[0]


@dataclass(frozen=True)
class Rows(Layout):
    """An array with one dim over samples."""

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
                f"{self.path} cannot be joined from parts of different shapes "
                f"({' and '.join(map(str, sorted(shapes)))}); pad every part to one length. They "
                "are joined because the loss is over the whole batch: its sum or weight does not add up over samples "
                "(nor does a weight of len(x) if x has its samples in a later dim)."
            )
        join: Any = numpy.concatenate if isinstance(values[0], numpy.ndarray) else torch.cat
        return join(values, self.dim)

    def grown(self, value: Any, length: int, samples: int) -> Any:
        """Expanded, so that it takes no memory."""
        if isinstance(value, numpy.ndarray):
            return super().grown(value, length, samples)
        return value.narrow(self.dim, 0, 1).expand([length if d == self.dim else -1 for d in range(value.dim())])


class Number(Layout):
    """A number that is proportional to the number of samples, such as `batch_size`."""

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        if isinstance(value, torch.Tensor):
            return (value * length / samples).to(value.dtype)
        return type(value)(value * length / samples)

    def joined(self, values: list[Any]) -> Any:
        return sum(values[1:], start=values[0])


class Listed(Layout):
    """A list or tuple with one entry per sample."""

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
    """A nested tensor with one tensor per sample."""

    def _list(self, value: Any) -> list[Any]:
        return list(value.unbind())

    def _rebuilt(self, value: Any, samples: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(samples, layout=value.layout)


class Graphs(Listed):
    """An object with the methods `to_data_list` and `from_data_list`, such as a batch of graphs."""

    def _list(self, value: Any) -> list[Any]:
        return list(value.to_data_list())

    def _rebuilt(self, value: Any, samples: list[Any]) -> Any:
        # Not the batch's own class: one that was derived for this batch would be derived again each time.
        owner: Any = next(kind for kind in type(value).__mro__ if "from_data_list" in vars(kind))
        return owner.from_data_list(samples)


@dataclass(frozen=True)
class Unknown(Layout):
    """A value that cannot be cut, and the reason."""

    why: str

    def take(self, *args: Any, **kwargs: Any) -> Any:
        raise CannotCut(self.path, self.why)

    turned = joined = take

    def unknown(self) -> Unknown:
        return self


@dataclass(frozen=True)
class Container(Layout):
    """A container with the same names in every batch."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]

    def count(self, value: Any) -> int | None:
        """The number of samples. All parts that have one must agree."""
        pairs = zip(self.layouts, self.parts(value).values, strict=True)
        found = [(layout.path, count) for layout, part in pairs if (count := layout.count(part)) is not None]
        for path, count in found[1:]:
            if count != found[0][1]:
                raise JobError(f"{found[0][0]} holds {found[0][1]} samples, but {path} holds {count}.")
        return found[0][1] if found else None

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        return self.mapped(value, lambda layout, part: layout.take(part, first, length, samples))

    def turned(self, value: Any) -> Any:
        return self.mapped(value, lambda layout, part: layout.turned(part))

    def joined(self, values: list[Any]) -> Any:
        held = [self.parts(value) for value in values]
        columns = zip(*(parts.values for parts in held), strict=True)
        joined = [layout.joined(list(column)) for layout, column in zip(self.layouts, columns, strict=True)]
        return held[0].rebuild(joined)

    def grown(self, value: Any, length: int, samples: int) -> Any:
        return self.mapped(value, lambda layout, part: layout.grown(part, length, samples))

    def mapped(self, value: Any, change: Callable[[Layout, Any], Any]) -> Any:
        """The same container with `change(layout, part)` for every part."""
        parts = self.parts(value)
        return parts.rebuild([change(layout, part) for layout, part in zip(self.layouts, parts.values, strict=True)])

    def unknown(self) -> Unknown | None:
        return next((found for layout in self.layouts if (found := layout.unknown()) is not None), None)

    def parts(self, value: Any) -> Parts:
        parts = parts_of(value)
        if parts is None or parts.names != self.names:
            names = "nothing" if parts is None else ", ".join(parts.names)
            why = f"holds {names}, but the batches that the job made hold {', '.join(self.names)}"
            raise CannotCut(self.path, why)
        return parts


def pairs_of(layout: Layout, value: Any) -> list[tuple[Layout, Any]]:
    """The values of a batch that are not containers, each with its layout."""
    if not isinstance(layout, Container):
        return [(layout, value)]
    pairs = zip(layout.layouts, layout.parts(value).values, strict=True)
    return [pair for inner, part in pairs for pair in pairs_of(inner, part)]


def rebuilt(layout: Layout, value: Any, values: Iterator[Any]) -> Any:
    """The same batch with other values in the places of `pairs_of`."""
    if not isinstance(layout, Container):
        return next(values)
    return layout.mapped(value, lambda inner, part: rebuilt(inner, part, values))
