"""The arguments of PyTorch's losses of class indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LossArguments:
    """The arguments of `F.cross_entropy` in its order. `F.nll_loss` has the same, but for the last."""

    input: Any
    target: Any
    weight: Tensor | None = None
    size_average: Any = None
    ignore_index: int = -100
    reduce: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether classes count alike and are not smoothed, and no deprecated argument is given."""
        return self.weight is None and self.label_smoothing == 0.0 and not self.is_deprecated

    @property
    def is_deprecated(self) -> bool:
        return self.size_average is not None or self.reduce is not None

    @property
    def has_indices(self) -> bool:
        """Whether the targets are class indices, and not shares of classes."""
        return isinstance(self.target, Tensor) and not self.target.is_floating_point()
