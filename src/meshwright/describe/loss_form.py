"""Recognise losses whose weight does not belong to their sum: a mean, a constant weight, padding that is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright.torch_private.modes import without_torch_function

NEAR = 1e-4
"""Relative tolerance for two numbers that would be equal without rounding."""
_SKIPPING, _WEIGHT, _POSITION = (F.cross_entropy, F.nll_loss), 2, 4
"""Losses that skip targets, and the positions of their arguments `weight` and `ignore_index`."""


class SkippedTargets(TorchFunctionMode):
    """Counts the targets of cross entropies while active, and those of them that `ignore_index` skips."""

    total = 0.0
    """The sum of the cross entropies, as long as all of them are plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = self.skipped = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SKIPPING:
            with without_torch_function():
                self._count(args, kwargs)
        result = func(*args, **kwargs)
        if func in _SKIPPING:
            is_sum = kwargs.get("reduction") == "sum" and kwargs.get("weight") is None and len(args) < _WEIGHT + 1
            self.total += float(result) if is_sum else math.nan
        return result

    def _count(self, args: Any, kwargs: Any) -> None:
        target = kwargs["target"] if "target" in kwargs else args[1]
        ignored = kwargs.get("ignore_index", args[_POSITION] if len(args) > _POSITION else -100)
        if not target.is_floating_point():  # probabilities have no padding
            self.targets += target.numel()
            self.skipped += int((target == ignored).sum())


def find_form(
    whole: torch.Tensor, parts: list[torch.Tensor], sizes: list[int], skipped: SkippedTargets, additive: bool
) -> str:
    """A key of `LOSS_FORMS`, from the (sum, weight) of a batch and of its parts; empty if nothing is wrong.

    `additive` says whether the parts' sums and weights add up to the batch's.
    """
    total, weight = (float(value) for value in whole)
    totals, weights = ([float(part[index]) for part in parts] for index in (0, 1))
    if additive:
        if skipped.skipped and _near(weight, skipped.targets):
            return "padding_counted"
        counts = (skipped.targets, skipped.targets - skipped.skipped, sum(sizes))
        is_counted = any(_near(weight, count) for count in counts)
        return "other_count" if _near(total, skipped.total) and not is_counted else ""
    if all(_near(weight, other) for other in weights):
        if _near(total, sum(totals)):
            return "constant_weight"
        return "mean_of_mean" if _is_mean(total, totals, sizes) and _near(weight, 1.0) else ""
    if not _near(weight, sum(weights)):
        return ""
    if _is_mean(total, totals, sizes) or _is_mean(total, totals, weights):
        return "divided_twice"
    if skipped.skipped:  # a mean over hidden counts: times the weight it is about as large as its parts together
        return "mean_without_padding" if 4 * abs(total) > 3 * abs(sum(totals)) else "divided_twice"
    return ""


def _is_mean(total: float, parts: list[float], counts: Sequence[float]) -> bool:
    return _near(total, sum(count * part for count, part in zip(counts, parts, strict=True)) / sum(counts))


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(abs(one), abs(other))
