"""The hardware section of a cluster file: any part of `Hardware`, checked, and replacing the catalogue's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from meshwright.errors import ClusterError
from meshwright.facts.hardware import Hardware, Link
from meshwright.reading import shown

_LINKS = ("within", "between", "host")
_KEYS = tuple(item.name for item in fields(Hardware))
_LINK_KEYS = tuple(item.name for item in fields(Link))
_TABLES = ("flops", "reach")
_WORDS = ("device", "kind")


def check_overrides(value: object) -> dict[str, Any]:
    """Return valid overrides; an error names the first wrong key or number."""
    found = _as_mapping("hardware", value)
    for key, part in found.items():
        _check_key("hardware", key, _KEYS)
        if key in _LINKS:
            _check_link(key, part)
        elif key in _TABLES:
            for name, number in _as_mapping(f"hardware.{key}", part).items():
                _check_number(f"hardware.{key}.{name}", number)
        elif key == "sources":
            _as_mapping("hardware.sources", part)
        elif key not in _WORDS:
            _check_number(f"hardware.{key}", part)
    return dict(found)


def lay_over(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a `Hardware` with parts replaced; links, tables and sources are merged.

    A replaced number cites the cluster's file as its source.
    """
    result = {**base, "sources": dict(base.get("sources", {}))}
    for key, part in overrides.items():
        if key == "sources":
            continue
        result[key] = {**base.get(key, {}), **part} if key in (*_LINKS, *_TABLES) else part
        replaced = [f"{key}.{name}" for name in part] if key in _LINKS else [key]
        result["sources"] |= dict.fromkeys(replaced, "the cluster's file")
    result["sources"].update(overrides.get("sources", {}))
    return result


def is_complete(overrides: Mapping[str, Any]) -> bool:
    """Whether the overrides set every number, so that the catalogue is not needed."""
    needed = set(_KEYS) - {"sources", "device", "reach"}
    return needed <= set(overrides) and all(set(_LINK_KEYS) <= set(overrides[name]) for name in _LINKS)


def _check_link(name: str, value: object) -> None:
    for key, part in _as_mapping(f"hardware.{name}", value).items():
        _check_key(f"hardware.{name}", key, _LINK_KEYS)
        if key not in _WORDS:
            _check_number(f"hardware.{name}.{key}", part)


def _as_mapping(name: str, value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ClusterError(f'{name} is {shown(value)}; it must be a JSON object, as in {{"hardware": {{"launch": 5e-6}}}}.')


def _check_key(where: str, key: str, known: tuple[str, ...]) -> None:
    if key not in known:
        near = get_close_matches(key, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ClusterError(f"{where} has no key {key!r}; {hint}Keys: {', '.join(known)}.")


def _check_number(name: str, number: object) -> None:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not number > 0 or not math.isfinite(number):  # type: ignore[operator,arg-type]
        raise ClusterError(f"{name} is {shown(number)}; it must be a number above 0, in bytes, seconds or per second.")
