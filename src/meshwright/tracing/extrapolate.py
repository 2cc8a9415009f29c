"""From two shorter models to a longer one: at every moment of a step, all is affine in the number of blocks.

A peak is not: it may lie at another moment in a longer model. So every moment is drawn out by itself, and the peak
found among them. In the blocks between the ends memory is between that of the ends, or the same. What the allocator
holds beyond the peak comes in segments, so that is not affine: the larger of the two is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

from meshwright.facts.trace import Message, Operation
from meshwright.tracing.record_step import Recorded


def extrapolate(shorter: Recorded, longer: Recorded, *, sizes: tuple[int, int], to: float) -> Recorded:
    """What was seen of models with `sizes` blocks as it would be with `to`."""
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
    """Counts grow; what grows itself (an update of all parameters at once) is drawn out as one of its kind."""
    grown: Counter[Item] = Counter()
    changed: dict[Hashable, list[Counter[str]]] = {}
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
    for key, (before_, after_) in changed.items():
        _add(grown, key, before_, after_, times, sums)
    return grown


def _add(grown: Counter[Any], key: Any, before: Counter[str], after: Counter[str], times: float, sums: Any) -> None:
    count = max(1, _affine(before["count"], after["count"], times))
    values = {name: _affine(before[name], after[name], times) / count for name in sums}
    grown[replace(key, **values)] += count
