"""Seconds of kernels from measured ones: the same kernel, or the nearest of the same operator, or else the catalogue's.

Between measured sizes, the ratio of measured to catalogue seconds is interpolated, not the seconds: the catalogue knows
how FLOPs and bytes add up, and the ratio changes slowly with the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log
from typing import NamedTuple

from meshwright.facts.costs import Kernel, Size
from meshwright.facts.hardware import Hardware
from meshwright.facts.kernel_table import KernelTable, MeasuredKernel
from meshwright.planner import kernels

EXACT, INTERPOLATED, CATALOGUE = SOURCES = ("exact", "interpolated", "catalogue")
"""Where the seconds of a kernel come from."""
NEIGHBOURS = 4
"""Measured kernels that an interpolation uses."""
FAR = log(64)
"""Beyond this distance from every measured size, a ratio is not carried over: 64 times the FLOPs or bytes."""
_WIDTHS = 3
"""How much farther apart heads of another width are than queries that sum over another number of keys."""
_CLOSE = 0.01
"""Added to squared distances, so that one nearest kernel does not outweigh equally near ones by rounding."""


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of kernels, by where they come from."""

    exact: float = 0.0
    interpolated: float = 0.0
    catalogue: float = 0.0

    @classmethod
    def of(cls, seconds: float, source: str) -> KernelSeconds:
        return cls(**{source: seconds})

    @property
    def total(self) -> float:
        return self.exact + self.interpolated + self.catalogue

    def __add__(self, other: KernelSeconds) -> KernelSeconds:
        return KernelSeconds(
            self.exact + other.exact, self.interpolated + other.interpolated, self.catalogue + other.catalogue
        )

    def __mul__(self, times: float) -> KernelSeconds:
        return KernelSeconds(self.exact * times, self.interpolated * times, self.catalogue * times)

    def shares(self) -> dict[str, float]:
        """Each source's share of the seconds."""
        return {source: getattr(self, source) / self.total if self.total else 0.0 for source in SOURCES}


NOTHING = KernelSeconds()


class _Point(NamedTuple):
    work: float
    """Steps, or FLOPs of a kernel without. Logarithms; the ratio is of measured to catalogue seconds."""
    bytes: float
    ratio: float


_Group = tuple[str, str, bool]
"""Kernels that tell of each other: an operator or a kind, a dtype, and whether they compute or load one element at a
time."""


class KernelPrices:
    """Prices the kernels of one device; `optimizer` is the class of the job's optimizer."""

    def __init__(self, table: KernelTable, hardware: Hardware, optimizer: str = "") -> None:
        self.table, self._hardware, self._optimizer = table, hardware, optimizer
        self._exact: dict[tuple[object, ...], tuple[float, int]] = {}
        self._near: dict[_Group, list[_Point]] = {}
        for measured in table.kernels:
            self._learn(measured)
        self._seconds = lru_cache(maxsize=1 << 16)(self._price)

    def _learn(self, measured: MeasuredKernel) -> None:
        sizes = round(measured.flops), round(measured.bytes), round(measured.steps)
        key = (measured.name, measured.dtype, measured.shape, *sizes)
        total, count = self._exact.get(key, (0.0, 0))
        self._exact[key] = total + measured.seconds * measured.count, count + measured.count
        usual = kernels.seconds(_as_kernel(measured), 1, 1, self._hardware)
        place = _place(measured.kind, measured.shape, measured.flops, measured.bytes, measured.steps)
        point = _Point(*place, log(measured.seconds / usual))
        for group in _groups(_as_kernel(measured), 1):
            self._near.setdefault(group, []).append(point)

    def seconds(self, kernel: Kernel, samples: float, parts: int, *, compiled: bool = False) -> KernelSeconds:
        """Device time of one kernel, as `kernels.seconds`.

        A compiler fuses elementwise kernels, which were measured one by one, so theirs are scaled as the catalogue's.
        Its code for strided operands is not slower.
        """
        if compiled and not kernel.flops.at(samples):
            return self._seconds(replace(kernel, steps=Size()), samples, parts) * kernels.FUSED
        return self._seconds(kernel, samples, parts)

    def update(self, elements: float) -> float | None:
        """Seconds of updating `elements` elements, from the nearest measured number; None for another optimizer."""
        known = [one for one in self.table.updates if one.optimizer == self._optimizer]
        if not known or not elements:
            return None
        nearest = min(known, key=lambda one: abs(log(one.elements / elements)))
        return nearest.seconds * elements / nearest.elements

    def _price(self, kernel: Kernel, samples: float, parts: int) -> KernelSeconds:
        flops, moved = kernel.flops.at(samples) / parts, kernel.bytes.at(samples) / parts
        steps = kernel.steps.at(samples) / parts
        if parts == 1:
            shape = tuple(round(size.at(samples)) for size in kernel.shape)
            key = (kernel.name, kernel.dtype, shape, round(flops), round(moved), round(steps))
            if found := self._exact.get(key):
                return KernelSeconds.of(found[0] / found[1], EXACT)
        usual = kernels.seconds(kernel, samples, parts, self._hardware)
        place = _place(kernel.kind, tuple(size.at(samples) for size in kernel.shape), flops * parts, moved, steps)
        for group in _groups(kernel, samples):
            ratio = _interpolate(self._near.get(group, ()), *place)
            if ratio is not None:
                return KernelSeconds.of(usual * exp(ratio), INTERPOLATED)
        return KernelSeconds.of(usual, CATALOGUE)


def _groups(kernel: Kernel, samples: float) -> tuple[_Group, ...]:
    """The groups of a kernel, the closest first. Kernels without products have little in common but their name."""
    names = (kernel.name,) if kernel.kind == "other" else (kernel.name, kernel.kind)
    is_slow = kernel.steps.at(samples) > 0 or kernels.is_unaligned(kernel)
    return tuple((name, kernel.dtype, is_slow) for name in names)


def _interpolate(points: Iterable[_Point], work: float, moved: float) -> float | None:
    """The logarithm of measured to catalogue seconds at a size: the mean of the nearest, weighted by their distance."""
    far = [(max(abs(point.work - work), abs(point.bytes - moved)), point) for point in points]
    nearest = sorted(far, key=lambda found: found[0])[:NEIGHBOURS]
    if not nearest or nearest[0][0] > FAR:
        return None
    weights = [1 / (distance**2 + _CLOSE) for distance, _ in nearest]
    return sum(w * point.ratio for w, (_, point) in zip(weights, nearest, strict=True)) / sum(weights)


def _place(kind: str, shape: Sequence[float], flops: float, moved: float, steps: float) -> tuple[float, float]:
    """Where a kernel is among those of its group: logarithms of its work and of the bytes that it moves.

    An attention's speed depends on how many keys a query sums over and on the width of its heads, hardly on its size.
    """
    if kind == "attention" and len(shape) == 4:
        heads, queries, _, width = shape
        return _log(flops / max(1.0, heads * queries * width)), _WIDTHS * _log(width)
    return _log(steps or flops), _log(moved)


def _log(amount: float) -> float:
    return log(max(amount, 1.0))


def _as_kernel(measured: MeasuredKernel) -> Kernel:
    return Kernel(
        name=measured.name,
        kind=measured.kind,
        dtype=measured.dtype,
        flops=Size(measured.flops),
        bytes=Size(measured.bytes),
        shape=tuple(Size(size) for size in measured.shape),
        steps=Size(measured.steps),
        copied=Size(measured.copied),
    )
