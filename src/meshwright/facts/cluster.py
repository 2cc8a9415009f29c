"""A cluster: nodes, devices, their memory and the link between nodes.

Written as `8xA100-40GB`, `4x8xH100-80GB@3200Gbps`, `local`, or a JSON file. The catalogue has the devices' numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from meshwright.errors import ClusterError, Unreadable
from meshwright.facts.hardware import check_overrides, is_amount
from meshwright.facts.links import BETWEEN_KINDS
from meshwright.reading import read_json, shown

LOCAL = "local"
"""Device of a cluster that means this machine, before the machine is inspected."""

_SHAPE = re.compile(r"(?:(?P<nodes>[0-9]{1,7})x)?(?P<devices>[0-9]{1,7})x(?P<device>[A-Za-z][^@]*)(?:@(?P<link>.*))?")
_DEVICE = re.compile(
    r"(?P<name>[A-Za-z][A-Za-z0-9_.]*(?:-[A-Za-z0-9_.]+)*?)"
    r"(?:-(?P<memory>[0-9]{1,9}(?:\.[0-9]{1,9})?)gi?b(?P<form>-(?:pcie|sxm\d?))?)?",
    re.I,
)
_LINK = re.compile(r"(?P<gbps>[0-9]{1,9}(?:\.[0-9]{1,9})?)gbps(?::(?P<kind>[a-z]+))?", re.I)
_FORMS = "Write DEVICESxNAME-MEMORY, as in 8xA100-40GB; NODESxDEVICESxNAME, as in 4x8xH100-80GB; local; or FILE.json."
_LINK_FORMS = f"Write Gbit/s of a node, as in @3200Gbps or @400Gbps:roce; kinds are {', '.join(BETWEEN_KINDS)}."
MOST = 10_000_000
"""Largest number of nodes, and of devices in each; a larger one is a typing error."""
_JSON_FORM = '{"devices_per_node": 8, "device": "A100-40GB"}'


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes and devices. `parse(str(cluster)) == cluster`, for a cluster read from text or a file."""

    nodes: int = 1
    devices_per_node: int = 1
    device: str
    """NAME or NAME-NNGB, as `A100-40GB`; `cpu`; or `local`, which `probe.machine` resolves."""
    memory_gib: float | None = None
    """Memory of one device. None: what the device's name says, or else the catalogue."""
    between_gbps: float | None = None
    """Gbit/s from one node to the others. None: what nodes with this device usually have."""
    between_kind: str | None = None
    """Kind of the link between nodes, one of BETWEEN_KINDS. None: what nodes with this device usually have."""
    hardware: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Parts of `Hardware` that replace the catalogue's: measured by `probe`, or written by the user."""
    source: str = field(default="", compare=False)
    """The file that the cluster was read from, or "". It is not compared."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            number = getattr(self, name)
            if type(number) is not int or not 1 <= number <= MOST:
                raise ClusterError(f"{name} is {shown(number)}; it must be a whole number from 1 to {MOST}. {_FORMS}")
        device, memory = _read_device(self.device)
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "memory_gib", _check_memory(memory if self.memory_gib is None else self.memory_gib))
        _check_link(self.between_gbps, self.between_kind)
        object.__setattr__(self, "hardware", check_overrides(self.hardware))
        if device == LOCAL and self.devices != 1:
            raise ClusterError(f"local means this machine with all its devices, so it takes no count. {_FORMS}")

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read a shape, `local` or the path of a JSON file."""
        text = text.strip()
        if text == LOCAL:
            return cls(device=LOCAL)
        if text.endswith(".json"):
            return cls.load(Path(text))
        found = _SHAPE.fullmatch(text)
        if found is None:
            hint = f"; did you mean '1x{text}'?" if _DEVICE.fullmatch(text) else "."
            raise ClusterError(f"Cannot read the cluster {text!r}{hint} {_FORMS}")
        nodes, devices = int(found["nodes"] or 1), int(found["devices"])
        gbps, kind = _read_link(found["link"])
        return cls(nodes=nodes, devices_per_node=devices, device=found["device"], between_gbps=gbps, between_kind=kind)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Read a cluster file."""
        try:
            value = read_json(path)
        except Unreadable as error:
            raise ClusterError(f"Cannot read the cluster file {str(path)!r}: {error.why}. {_FORMS}") from None
        try:
            return cls.from_json({**_as_mapping(value), "source": str(path)})
        except ClusterError as error:
            raise ClusterError(f"The cluster file {str(path)!r} is wrong: {error}") from error

    def __str__(self) -> str:
        # A file can hold more than a shape can express, so a cluster from a file prints as the file's name.
        if self.source:
            return self.source
        if self.device == LOCAL:
            return LOCAL
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device}{_show_link(self.between_gbps, self.between_kind)}"

    @property
    def devices(self) -> int:
        """Devices on all nodes."""
        return self.nodes * self.devices_per_node

    def to_json(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cluster:
        names = [item.name for item in fields(cls)]
        unknown = sorted(set(_as_mapping(value)) - set(names))
        if unknown:
            raise ClusterError(f"A cluster has no key {unknown[0]!r}. Keys: {', '.join(names)}.")
        if "device" not in value:
            raise ClusterError(f'A cluster needs the key "device", as in {_JSON_FORM}.')
        return cls(**value)


def _as_mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ClusterError(f"A cluster is a JSON object, as in {_JSON_FORM}.")


def _check_memory(memory: float | None) -> float | None:
    if memory is None:
        return None
    if not is_amount(memory):
        raise ClusterError(f"memory_gib is {shown(memory)}; it must be a number above 0, as in 8xA100-40GB.")
    return float(memory)


def _read_device(text: object) -> tuple[str, float | None]:
    """The device's canonical name, and the memory in it."""
    found = _DEVICE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ClusterError(
            f"Cannot read the device {shown(text)}: write NAME or NAME-MEMORY, as in A100-40GB. {_FORMS}"
        )
    if found["memory"] is None:
        return found[0], None
    # Device names say GB but mean GiB: an A100-40GB has 40 x 2^30 bytes on board.
    form = (found["form"] or "").upper().replace("PCIE", "PCIe")
    return f"{found['name']}-{found['memory']}GB{form}", float(found["memory"])


def _read_link(text: str | None) -> tuple[float | None, str | None]:
    if text is None:
        return None, None
    found = _LINK.fullmatch(text)
    if found is None:
        raise ClusterError(f"Cannot read the link between nodes {text!r}. {_LINK_FORMS}")
    return float(found["gbps"]), found["kind"] and found["kind"].lower()


def _show_link(gbps: float | None, kind: str | None) -> str:
    if gbps is None:
        return ""
    return f"@{int(gbps) if gbps == int(gbps) else gbps}Gbps{f':{kind}' if kind else ''}"


def _check_link(gbps: object, kind: object) -> None:
    if gbps is not None and not is_amount(gbps):
        raise ClusterError(f"between_gbps is {shown(gbps)}; it must be a number above 0. {_LINK_FORMS}")
    if kind is not None and not (isinstance(kind, str) and kind in BETWEEN_KINDS):
        raise ClusterError(f"The link between nodes is of kind {shown(kind)}, which is unknown. {_LINK_FORMS}")
    if kind is not None and gbps is None:
        raise ClusterError(f"The link between nodes has a kind, {kind}, but no speed. {_LINK_FORMS}")
