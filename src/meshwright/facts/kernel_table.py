"""Kernels measured on one device: seconds by operator, sizes and dtype. `probe --kernels` keeps them in a JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from meshwright.errors import BadInput, OutputError, Unreadable
from meshwright.facts.catalogue import catalogue_name
from meshwright.facts.hardware import is_amount
from meshwright.reading import Limits, read_json
from meshwright.units import MIB

FORMAT = "meshwright kernels 1"
SHIPPED = Path(__file__).parent / "kernel_tables"
LIMITS = Limits(bytes=64 * MIB, values=4_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredKernel:
    """One operator on tensors of one layout."""

    name: str
    """The operator without its overload, as in `Kernel.name`."""
    kind: str
    """"matmul", "attention", "convolution", "recurrent" or "other"."""
    dtype: str
    flops: float
    bytes: float
    """Bytes read and written."""
    shape: tuple[int, ...] = ()
    """As in `Kernel.shape`."""
    steps: float = 0.0
    """As in `Kernel.steps`."""
    copied: float = 0.0
    """As in `Kernel.copied`."""
    seconds: float
    signature: str
    """The overload with shapes, strides, dtypes and other arguments."""
    count: int = 1
    """How often the traced step ran it: the weight among kernels that a model's costs cannot tell apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredUpdate:
    """The optimizer's part of a step: the sum of its kernels."""

    optimizer: str
    """The class of the optimizer."""
    elements: float
    """Elements that one rank updates."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """What was measured on one device with one release of PyTorch."""

    device: str
    """As in a cluster's text: `H200`, or `cpu`."""
    machine: str
    """The device in the driver's words, or the cores of a CPU."""
    torch: str
    threads: int = 1
    """Threads of a CPU's kernels."""
    launch: float
    """Seconds of one operator on almost no data."""
    host: float = 0.0
    """Seconds of the reference pass on this host (`tracing/host_passes.py`); 0 if it was not timed."""
    step: float = 0.0
    """Seconds of one step of the engine on a model of a single weight; 0 if it was not timed."""
    kernels: tuple[MeasuredKernel, ...] = ()
    updates: tuple[MeasuredUpdate, ...] = ()

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.device, self.machine, self.threads, self.torch

    def merged(self, newer: KernelTable) -> KernelTable:
        """Both tables of one device; where both have measured something, the newer counts."""
        kernels = {kernel.signature: kernel for kernel in (*self.kernels, *newer.kernels)}
        updates = {(update.optimizer, update.elements): update for update in (*self.updates, *newer.updates)}
        return replace(newer, kernels=tuple(kernels.values()), updates=tuple(updates.values()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_tables(path: Path) -> tuple[KernelTable, ...]:
    """The tables of a file; an error names the first wrong value."""
    document = read_json(path, LIMITS)
    named = isinstance(document, dict) and document.get("format") == FORMAT
    if not named or not isinstance(document.get("tables"), list):
        raise Unreadable(path, f'it is not a file of measured kernels: it needs "format": "{FORMAT}" and "tables"')
    return tuple(_table(path, f"tables[{place}]", value) for place, value in enumerate(document["tables"]))


def write_tables(path: Path, tables: Iterable[KernelTable]) -> None:
    """Write tables at once, so that an interrupted write leaves the file as it was."""
    document = {"format": FORMAT, "tables": [table.to_json() for table in tables]}
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        os.replace(file.name, path)
    except OSError as error:
        raise OutputError(f"Cannot write the kernels to {str(path)!r}: {error}.") from error


def add_table(tables: Sequence[KernelTable], new: KernelTable) -> tuple[KernelTable, ...]:
    """The tables with a new one, merged with that of the same device and PyTorch."""
    same = next((table for table in tables if table.key == new.key), None)
    others = [table for table in tables if table is not same]
    return (*others, same.merged(new) if same else new)


def find_table(tables: Sequence[KernelTable], device: str, torch: str) -> KernelTable | None:
    """The table of a device; of several, that of the PyTorch in use, or else the last one."""
    fitting = [table for table in tables if _full_name(table.device) == _full_name(device)]
    return next((table for table in reversed(fitting) if table.torch == torch), fitting[-1] if fitting else None)


def shipped_table(device: str, folder: Path = SHIPPED) -> KernelTable | None:
    """The table of a grid of sizes that ships for a device, from which a plan without measured kernels interpolates.

    `benchmarks/kernel_table.py` writes it. It says nothing about a host.
    """
    path = folder / f"{_full_name(device)}.json"
    found = find_table(read_tables(path), device, "") if path.is_file() else None
    return None if found is None else replace(found, host=0.0, step=0.0)


def _full_name(device: str) -> str:
    """The catalogue's name of a device that a user may have called by a shorter one."""
    return catalogue_name(device) or device


def require_device(tables: Sequence[KernelTable], device: str, source: str) -> None:
    """Refuse tables that have no kernels of a cluster's device."""
    known = list(dict.fromkeys(table.device for table in tables))
    if _full_name(device) not in map(_full_name, known):
        raise BadInput(
            f"{source} has kernels of {', '.join(known) or 'no device'}, but the cluster's device is {device}; "
            "measure them there with `meshwright probe --kernels`, or leave --kernels out."
        )


def _table(path: Path, place: str, value: Any) -> KernelTable:
    found = _fields(path, place, value, KernelTable)
    rows = {
        key: tuple(_row(path, f"{place}.{key}[{i}]", row, kind) for i, row in enumerate(found.get(key, ())))
        for key, kind in (("kernels", MeasuredKernel), ("updates", MeasuredUpdate))
    }
    _amounts(path, place, found, ("launch",))
    return KernelTable(**{**found, **rows})


def _row(path: Path, place: str, value: Any, kind: type) -> Any:
    found = _fields(path, place, value, kind)
    _amounts(path, place, found, ("seconds",))
    if "shape" in found:
        if not all(isinstance(size, int) for size in found["shape"]):
            raise Unreadable(path, f"{place}.shape is not a list of whole numbers")
        found["shape"] = tuple(found["shape"])
    return kind(**found)


def _fields(path: Path, place: str, value: Any, kind: type) -> dict[str, Any]:
    """A row as keyword arguments: every field of the right JSON type, and no other."""
    if not isinstance(value, Mapping):
        raise Unreadable(path, f"{place} is not an object")
    known = {item.name: str(item.type) for item in fields(kind)}
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise Unreadable(path, f"{place} has an unknown key {unknown!r}")
    for name, annotation in known.items():
        kind_of_value, words = _JSON_TYPES[annotation.split("[")[0]]
        if name in value and not isinstance(value[name], kind_of_value):
            raise Unreadable(path, f"{place}.{name} is not {words}")
    needed = [name for name in _NEEDED[kind.__name__] if name not in value]
    if needed:
        raise Unreadable(path, f"{place} has no {needed[0]!r}")
    return dict(value)


def _amounts(path: Path, place: str, value: Mapping[str, Any], names: tuple[str, ...]) -> None:
    wrong = next((name for name in names if not is_amount(value[name])), None)
    if wrong is not None:
        raise Unreadable(path, f"{place}.{wrong} is {value[wrong]!r}; it must be a number above 0")


_JSON_TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, "a text"),
    "float": (int | float, "a number"),
    "int": (int, "a whole number"),
    "tuple": (list, "a list"),
}
_NEEDED = {
    "KernelTable": ("device", "machine", "torch", "launch"),
    "MeasuredKernel": ("name", "kind", "dtype", "flops", "bytes", "seconds", "signature"),
    "MeasuredUpdate": ("optimizer", "elements", "seconds"),
}
