"""Read another framework's settings one by one, and keep track of those that were not read; what reading gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ExchangeError
from meshwright.facts.model_axis import MODEL_AXES, AxisTerm
from meshwright.facts.strategy import Strategy
from meshwright.reading import shown

AUTO = "auto"
"""In Hugging Face's DeepSpeed configs: the script decides."""
_NUMBER = re.compile(r"-?[0-9]{1,15}")
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Fields:
    """One table of a config file. A setting of None or "auto" counts as missing."""

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self.file = file
        self._values, self._prefix = values, prefix
        self._read: set[str] = set()
        self._tables: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) not in (None, AUTO)

    def path(self, name: str) -> str:
        """A setting's full name, including the enclosing tables."""
        return f"{self._prefix}{name}"

    def take(self, name: str, default: Any = None) -> Any:
        """A setting of any type."""
        self._read.add(name)
        return self._values[name] if name in self else default

    def number(self, name: str, default: int) -> int:
        """A whole number, possibly written as text. Some frameworks write -1 for "the rest"."""
        value = self.take(name, default)
        text = str(value).strip()
        if isinstance(value, bool) or not _NUMBER.fullmatch(text):
            raise self.wrong(name, "a whole number")
        return int(text)

    def size(self, name: str, default: int = 1) -> int:
        """A whole number of at least 1."""
        number = self.number(name, default)
        if number < 1:
            raise self.wrong(name, "a whole number of at least 1")
        return number

    def maybe(self, name: str) -> int | None:
        """A whole number of at least 1, or None if missing."""
        return self.size(name) if name in self else self.take(name)

    def real(self, name: str) -> float | None:
        """A number, or None if missing."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self.wrong(name, "a number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean, possibly written as text."""
        text = str(self.take(name, default)).strip().lower()
        if text not in _FLAGS:
            raise self.wrong(name, "true or false")
        return _FLAGS[text]

    def word(self, name: str, default: str) -> str:
        value = self.take(name, default)
        # YAML reads a bare `no` as a boolean.
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value).strip()

    def table(self, name: str) -> Fields:
        """A nested table; empty if missing."""
        value = self.take(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "a table of settings")
        return self._tables.setdefault(name, Fields(value, self.file, f"{self.path(name)}."))

    def skip(self, *names: str) -> None:
        """Mark settings as read that do not affect the strategy."""
        self._read.update(names)

    def unread(self) -> Iterator[str]:
        """The full names of settings that were not read."""
        yield from (self.path(name) for name in self._values if name not in self._read and name in self)
        for inner in self._tables.values():
            yield from inner.unread()

    def wrong(self, name: str, wanted: str) -> ExchangeError:
        """The error for a setting with a wrong value."""
        found = self._values.get(name)
        return ExchangeError(f"{self.file}: {self.path(name)} is {shown(found)}; it must be {wanted}.")


def read_axes(framework: str, fields: Fields, schedule: str = "") -> tuple[AxisTerm, ...]:
    """The axes of more than one rank. `schedule` applies to a staged axis."""
    found = []
    for word, traits in MODEL_AXES.items():
        if framework in traits.config_fields and (size := fields.size(traits.config_fields[framework])) > 1:
            found.append(AxisTerm(word, size, schedule if traits.staged else ""))
    return tuple(found)


def axis_fields(framework: str) -> list[str]:
    """The fields that hold the sizes of model axes."""
    return [field for traits in MODEL_AXES.values() if (field := traits.config_fields.get(framework))]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A strategy read from another framework's config."""

    strategy: Strategy
    """Has the sizes that the file sets."""
    origin: str
    """The framework: deepspeed, accelerate or torchtitan."""
    file: str
    ignored: tuple[str, ...] = ()
    """Names of settings without an equal here; some with what was used instead."""
    global_batch: int | None = None
    """Samples per optimizer step, if the file sets it."""
    max_norm: float | None = None
    """Gradient clipping norm, if the file sets it."""
