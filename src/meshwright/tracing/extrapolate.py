"""Extrapolate from two shorter models to a longer one.

At every moment of a step, memory and work are affine in the number of blocks. A peak is not: it may be at another
moment in a longer model. So every moment is extrapolated separately, and the peak is found among the results. The
memory of middle blocks is between that of the first and the last ones. What the allocator reserves beyond the peak
comes in segments and is not affine, so the larger of the two amounts is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from meshwright.facts.trace import Message, Operation
from meshwright.tracing.record_step import Recorded


def extrapolate(shorter: Recorded, longer: Recorded, *, sizes: tuple[int, int], to: float) -> Recorded:
    """The record of a model with `to` blocks, from the records of models with `sizes` blocks."""
    times = (to - sizes[0]) / (sizes[1] - sizes[0])
    moments = [moment for moment in shorter.peaks if moment in longer.peaks]
    peaks = {m: _causes(shorter.peaks[m], longer.peaks[m], times) for m in moments}
    return Recorded(
        peaks=peaks,
        reserved=_peak(peaks) + max(record.reserved - _peak(record.peaks) for record in (shorter, longer)),
        operations=_operations(shorter.operations, longer.operations, times),
        messages=_messages(shorter.messages, longer.messages, times),
        stages=longer.stages,
        uncompiled=longer.uncompiled,
    )


def _peak(peaks: dict[str, Counter[str]]) -> int:
    return max(causes.total() for causes in peaks.values())


def _affine(first: float, second: float, times: float) -> int:
    return max(0, round(first + (second - first) * times))


def _causes(first: Counter[str], second: Counter[str], times: float) -> Counter[str]:
    return Counter({cause: _affine(first[cause], second[cause], times) for cause in first | second})


Item = TypeVar("Item", Operation, Message)


def _operations(first: Counter[Operation], second: Counter[Operation], times: float) -> Counter[Operation]:
    return _items(first, second, times, lambda item: replace(item, flops=0.0, bytes=0.0, shape=()), ("flops", "bytes"))


def _messages(first: Counter[Message], second: Counter[Message], times: float) -> Counter[Message]:
    return _items(first, second, times, lambda item: replace(item, bytes=0.0), ("bytes",))


def _items(
    first: Counter[Item], second: Counter[Item], times: float, kind: Callable[[Item], Item], sums: tuple[str, ...]
) -> Counter[Item]:
    """Extrapolate counts. An item whose size grows (an update of all parameters at once) is matched by its kind."""
    grown: Counter[Item] = Counter()
    changed: dict[Item, list[Counter[str]]] = {}
    for item in first | second:
        before, after = first[item], second[item]
        if after >= before > 0:
            grown[item] = _affine(before, after, times)
            continue
        totals = changed.setdefault(kind(item), [Counter(), Counter()])
        for total, count in zip(totals, (before, after), strict=True):
            total["count"] += count
            for name in sums:
                total[name] += count * getattr(item, name)
    for key, (small, large) in changed.items():
        count = max(1, _affine(small["count"], large["count"], times))
        values: Any = {name: _affine(small[name], large[name], times) / count for name in sums}
        grown[replace(key, **values)] += count
    return grown
