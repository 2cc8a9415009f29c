"""Speeds and sizes of a device, its links and its host, from which forecasts are computed.

A cluster file may replace any part of them: its hardware section is checked and laid over the catalogue's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from meshwright.errors import ClusterError
from meshwright.reading import shown


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between devices, or between a device and its host."""

    kind: str
    """"nvlink", "pcie", "infiniband", "roce", "efa", "ethernet", "shared-memory"."""
    bandwidth: float
    """Bytes per second in one direction: per device within a node, per *node* between nodes."""
    latency: float
    """Seconds that the smallest message takes between neighbours."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Numbers of one kind of node. `sources` cites where each comes from."""

    device: str
    memory: int
    """Bytes of one device that a process can use, including its context."""
    flops: Mapping[str, float]
    """Dense peak FLOP/s of matmuls by compute dtype: `fp32`, `bf16`, `fp16`."""
    bandwidth: float
    """Bytes per second of the device's memory, reads and writes together."""
    launch: float
    """Seconds that the host needs to launch one kernel in eager PyTorch."""
    within: Link
    """Between devices of one node."""
    between: Link
    """Between nodes."""
    host: Link
    """Between a device and its host's memory."""
    host_memory: int
    """Bytes of host memory per node."""
    reach: Mapping[str, float] = field(default_factory=dict)
    """Measured shares of the peaks that kernels of a training step reach: `matmul`, `attention`, `stream`.
    `in order` is that of kernels that stream long rows, if it differs. `clock` is the share of the data sheet's clock
    that a lower limit of power leaves."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The data sheet or measurement behind each field, such as `within.bandwidth`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Hardware:
        links = {name: Link(**value[name]) for name in ("within", "between", "host")}
        return cls(**{**value, **links})


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
    if not is_amount(number):
        raise ClusterError(f"{name} is {shown(number)}; it must be a number above 0, in bytes, seconds or per second.")


def is_amount(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0 and math.isfinite(value)  # type: ignore[operator,arg-type]  # it is a number
