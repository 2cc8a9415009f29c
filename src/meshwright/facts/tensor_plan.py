"""How tensor parallelism divides a model's layers: found or given before any weight exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import gcd
from typing import Any

from meshwright.errors import either

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
ROLES = ("column", "row", "vocabulary", "whole")
SOURCES = {"job": "Job(tensor_plan=...)", "model": "the model's own plan", "found": "found in a step on fake tensors"}


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One layer and how it is divided."""

    module: str
    role: str
    """`column` divides its outputs, `row` its inputs, `vocabulary` the classes of an embedding or head; or `whole`."""
    parts: int = 1
    """The number that the ranks must divide."""
    what: str = "width"
    """The unit of `parts`: heads, width or vocabulary."""
    pieces: int = 1
    """Number of concatenated outputs of a fused layer (such as query, key and value), each divided separately."""
    feeds: str = ""
    """For a column layer: the row layer that its outputs feed."""
    source: str = "found"
    """Where the role comes from, a key of SOURCES."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Every layer with a weight matrix, in the order of the model's modules."""

    rows: tuple[TensorRow, ...]
    sequence: bool = False
    """Whether activations between blocks are (batch, sequence, width), so that sequence parallelism can divide them."""

    @cached_property
    def divided(self) -> tuple[TensorRow, ...]:
        return tuple(row for row in self.rows if row.role != "whole")

    @cached_property
    def _widest(self) -> dict[str, int]:
        """For each row layer, the most parts of a layer that feeds it."""
        widest: dict[str, int] = {}
        for row in self.divided:
            widest[row.feeds] = max(row.parts, widest.get(row.feeds, 0))
        return widest

    @cached_property
    def _refusals(self) -> dict[int, str | None]:
        return {}

    def refuse(self, ranks: int) -> str | None:
        """Why `ranks` ranks cannot divide the model; None if they can."""
        if ranks not in self._refusals:  # a search asks again for every candidate
            self._refusals[ranks] = self._refuse(ranks)
        return self._refusals[ranks]

    def _refuse(self, ranks: int) -> str | None:
        if not self.divided:
            reason = next((f" ({row.module}: {row.reason})" for row in self.rows if row.reason), "")
            return (
                f"tp={ranks} was asked, but no layer can be divided: it takes linear layers of a block that feed "
                f"another linear layer, or a vocabulary{reason}; name layers in "
                f"Job(tensor_plan=...), or use op={ranks}, which divides single operators."
            )
        needed = [row for row in self.divided if not self._may_be_whole(row)]
        if bad := [row for row in needed if row.parts % ranks]:
            return (
                f"tp={ranks} was asked, but {_size(bad[0])}, which {ranks} ranks cannot divide; {self._advice(needed)}"
            )
        if not self.for_ranks(ranks).divided:
            found = _size(self.divided[0])
            return f"tp={ranks} was asked, but {found}, and nothing else could be divided; use op={ranks}."
        return None

    def for_ranks(self, ranks: int) -> TensorPlan:
        """The plan for `ranks` ranks: layers that they cannot divide, and need not, stay whole."""
        return replace(self, rows=tuple(self._for_ranks(row, ranks) for row in self.rows))

    def as_mapping(self) -> dict[str, str]:
        """The value of Job(tensor_plan=...) that gives the same plan; repeated layers are one pattern."""
        return {pattern: row.role for pattern, row in self._patterns()}

    def table(self) -> list[tuple[str, str, str, str]]:
        """Rows for printing: layer, role, what is divided, and why."""
        return [
            (pattern, row.role, _parts(row), row.reason or SOURCES[row.source]) for pattern, row in self._patterns()
        ]

    def _patterns(self) -> Iterator[tuple[str, TensorRow]]:
        """Merge rows whose names differ only in a number into a pattern, `blocks.*.up`, if it matches no other row."""
        groups: dict[str, list[TensorRow]] = {}
        for row in self.rows:
            groups.setdefault(_NUMBER.sub(".*", row.module), []).append(row)
        for pattern, rows in groups.items():
            alike = len({replace(row, module="", feeds="") for row in rows}) == 1
            if len(rows) > 1 and alike and sum(fnmatchcase(row.module, pattern) for row in self.rows) == len(rows):
                yield pattern, rows[0]
            else:
                yield from ((row.module, row) for row in rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TensorPlan:
        return cls(**{**document, "rows": tuple(TensorRow(**row) for row in document["rows"])})

    def _for_ranks(self, row: TensorRow, ranks: int) -> TensorRow:
        if row.role == "whole" or row.parts % ranks == 0 or not self._may_be_whole(row):
            return row
        unit = "key-value head" if row.what == "heads" else row.what
        count = f"{row.parts} {unit}{'s' if unit == 'key-value head' and row.parts > 1 else ''}"
        return replace(row, role="whole", reason=f"on every rank: {count} for {ranks} ranks")

    def _may_be_whole(self, row: TensorRow) -> bool:
        """Whether a layer may stay whole: vocabularies, and keys and values with fewer heads than the queries."""
        if row.role == "vocabulary":
            return True
        meets = row.feeds and row.what == "heads" and row.role == "column"
        return bool(meets) and row.parts < self._widest.get(row.feeds, 0)

    def _advice(self, needed: list[TensorRow]) -> str:
        common = gcd(*(row.parts for row in needed))
        sizes = [str(size) for size in range(2, common + 1) if common % size == 0]
        return f"tp can be {either(sizes)}." if sizes else "no tp divides all of its layers; use op=N instead."


def _size(row: TensorRow) -> str:
    heads = "1 head" if row.parts == 1 else f"{row.parts} heads"
    unit = {"heads": heads, "vocabulary": f"a vocabulary of {row.parts}"}
    return f"{row.module} has {unit.get(row.what, f'a width of {row.parts}')}"


def _parts(row: TensorRow) -> str:
    if row.role == "whole":
        return ""
    return f"{row.parts} {row.what}" if row.what == "heads" else f"{row.what} {row.parts}"
