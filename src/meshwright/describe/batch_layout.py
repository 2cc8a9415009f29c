"""Where the samples lie in a batch, and how each kind of value is counted, cut and joined.

`describe/learnt_layout.py` finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
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
        pairs = zip(self.layouts, self.parts(value).values, strict=True)
        found = [(layout.path, count) for layout, part in pairs if (count := layout.count(part)) is not None]
        for path, count in found[1:]:
            if count != found[0][1]:
                raise JobError(f"{found[0][0]} holds {found[0][1]} samples, but {path} holds {count}.")
        return found[0][1] if found else None

    def take(self, value: Any, first: int, length: int, samples: int) -> Any:
        parts = self.parts(value)
        pairs = zip(self.layouts, parts.values, strict=True)
        return parts.rebuild([layout.take(part, first, length, samples) for layout, part in pairs])

    def turned(self, value: Any) -> Any:
        parts = self.parts(value)
        pairs = zip(self.layouts, parts.values, strict=True)
        return parts.rebuild([layout.turned(part) for layout, part in pairs])

    def joined(self, values: list[Any]) -> Any:
        held = [self.parts(value) for value in values]
        columns = zip(*(parts.values for parts in held), strict=True)
        joined = [layout.joined(list(column)) for layout, column in zip(self.layouts, columns, strict=True)]
        return held[0].rebuild(joined)

    def grown(self, value: Any, length: int, samples: int) -> Any:
        parts = self.parts(value)
        pairs = zip(self.layouts, parts.values, strict=True)
        return parts.rebuild([layout.grown(part, length, samples) for layout, part in pairs])

    def unknown(self) -> Unknown | None:
        return next((found for layout in self.layouts if (found := layout.unknown()) is not None), None)

    def parts(self, value: Any) -> Parts:
        parts = parts_of(value)
        if parts is None or parts.names != self.names:
            names = "nothing" if parts is None else ", ".join(parts.names)
            why = f"holds {names}, where batches that the job made held {', '.join(self.names)}"
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
    parts = layout.parts(value)
    pairs = zip(layout.layouts, parts.values, strict=True)
    return parts.rebuild([rebuilt(inner, part, values) for inner, part in pairs])
