"""Read untrusted files within limits: configs, plans, tables of runs, checkpoint manifests.

Only regular files are opened, so a pipe or a device cannot hang the reader. Size, number of values, depth, aliases and
length of numbers are bounded, so a small file cannot grow large in memory. Every problem raises `Unreadable`.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import Unreadable
from meshwright.units import KIB, MIB, show_bytes


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large a file and its content may be."""

    bytes: int = 8 * MIB
    values: int = 250_000
    """Values in all lists and tables together; an alias counts as what it refers to."""
    depth: int = 64
    """Nesting depth of lists and tables."""
    digits: int = 100
    """Digits of an integer: a hundred still fit a float."""
    finite: bool = True
    """Whether infinities, NaN and longer integers are refused."""
    infinite: bool = False
    """Whether infinities are accepted even so."""


SETTINGS = Limits()
YAML = Limits(bytes=256 * KIB, values=20_000)
"""YAML is parsed about a hundred times slower than JSON."""
TOML = Limits(infinite=True)
"""TOML can express infinity, and torchtitan's `max_norm = inf` means no clipping."""
_TOO_DEEP = "it nests lists and tables deeper than {}"
_DOTS = 1000
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER = re.compile(r"[-+.]?\d")


def refuse_special(path: Path) -> None:
    """Refuse pipes and devices, which would hang a library that opens the path itself."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable(path, "it is not a regular file")
    except (OSError, ValueError) as error:
        raise Unreadable(path, getattr(error, "strerror", None) or str(error)) from None


def read_bytes(path: Path, limit: int = SETTINGS.bytes) -> bytes:
    """All bytes of a regular file of at most `limit` bytes."""
    try:
        # A blocking open would hang on a pipe that has no writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Unreadable(path, "it is not a regular file")
            # Files under /proc report no size before they are read.
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                content = file.read(limit + 1) if found.st_size <= limit else b""
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        missing = isinstance(error, FileNotFoundError)
        raise Unreadable(path, getattr(error, "strerror", None) or str(error), missing=missing) from None
    if found.st_size > limit or len(content) > limit:
        raise Unreadable(path, f"it is larger than {show_bytes(limit)}")
    return content


def read_text(path: Path, limit: int = SETTINGS.bytes) -> str:
    """The UTF-8 text of a regular file."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable(path, "it is not UTF-8 text") from None


def read_json(path: Path, limits: Limits = SETTINGS) -> Any:
    """The parsed JSON of a regular file."""
    text = read_text(path, limits.bytes)
    try:
        return parse_json(text, limits)
    except ValueError as error:
        raise Unreadable(path, str(error)) from None


def parse_json(text: str, limits: Limits = SETTINGS, **hooks: Any) -> Any:
    """Parse JSON within limits; ValueError says what is wrong. `hooks` go to the parser."""
    # Checked before parsing: outside of strings, each of these characters adds one value.
    if _commas(text) > limits.values and _commas(_STRING.sub("", text)) > limits.values:
        raise ValueError(f"it holds more than {limits.values} values")
    try:
        value = json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP.format(limits.depth)) from None
    return _checked(value, limits)


def parse_toml(text: str, limits: Limits = TOML) -> dict[str, Any]:
    """Parse TOML within limits; ValueError says what is wrong."""
    # The parser copies a dotted key once for each of its levels.
    if any(line.count(".") > _DOTS for line in text.splitlines()):
        raise ValueError(f"one of its lines has more than {_DOTS} dots")
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP.format(limits.depth)) from None
    _checked(value, limits)
    return value


def parse_yaml(text: str, limits: Limits = YAML) -> Any:
    """Parse YAML's plain types within limits; ValueError says what is wrong."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) > limits.bytes:
        raise ValueError(f"it is larger than {show_bytes(limits.bytes)}, the limit for YAML")
    try:
        _refuse_bomb(yaml.parse(text, loader), limits)
        return _checked(yaml.load(text, loader), limits)  # both are safe loaders
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        first = str(getattr(error, "problem", None) or error).splitlines()
        raise ValueError(f"it is not YAML: {first[0] if first else type(error).__name__}") from None


def shown(value: Any, length: int = 60) -> str:
    """A foreign value as part of our sentence, shortened."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _commas(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _checked(value: Any, limits: Limits) -> Any:
    """Return the value; ValueError if it is nested too deeply or holds a number that is too long or not finite."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > limits.depth + 1:
            raise ValueError(_TOO_DEEP.format(limits.depth))
        if limits.finite:
            _refuse_numbers(level, limits)
        level = [child for outer in level for child in _children(outer)]
    return value


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _refuse_numbers(values: list[Any], limits: Limits) -> None:
    largest = 10**limits.digits
    for number in values:
        if isinstance(number, float) and (math.isnan(number) or (math.isinf(number) and not limits.infinite)):
            raise ValueError(f"it holds {number}, but numbers must be finite")
        if isinstance(number, int) and abs(number) >= largest:
            raise ValueError(f"it holds an integer of more than {limits.digits} digits")


def _refuse_bomb(events: Iterator[Any], limits: Limits) -> None:
    """Count what YAML would create before creating it: nested aliases and merged tables grow exponentially."""
    sizes: dict[str, int] = {}
    open_nodes: list[list[Any]] = [["", 0]]  # anchor and values so far
    for event in events:
        kind = type(event).__name__
        if kind in ("MappingStartEvent", "SequenceStartEvent"):
            open_nodes.append([event.anchor, 1])
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, size = open_nodes.pop()
            sizes[anchor] = size
            open_nodes[-1][1] += size
        elif kind == "ScalarEvent":
            sizes[event.anchor] = 1
            open_nodes[-1][1] += 1
            if not event.style and _NUMBER.match(event.value) and len(event.value) > limits.digits:
                raise ValueError(f"it holds a number of {len(event.value)} characters")
        elif kind == "AliasEvent":
            if event.anchor not in sizes:
                raise ValueError(f"its alias *{event.anchor} refers to no earlier anchor, or to its own parent")
            open_nodes[-1][1] += sizes[event.anchor]
        if len(open_nodes) - 1 > limits.depth:
            raise ValueError(_TOO_DEEP.format(limits.depth))
        if open_nodes[-1][1] > limits.values:
            raise ValueError(f"it holds more than {limits.values} values with aliases expanded")
