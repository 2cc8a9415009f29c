"""fp16 in a user's loop: a step whose gradients overflowed on any rank updates nothing."""

from __future__ import annotations

from math import isfinite

import torch
from torch import nn

from meshwright.assemble.precision import LossScale
from meshwright.runtime.loop_norm import norm_of


class OverflowGuard:
    """Takes gradients that overflowed away for the time of a step: optimizers pass over such parameters."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        self._taken: list[tuple[nn.Parameter, torch.Tensor]] = []

    def before_step(self, parameters: list[nn.Parameter]) -> bool:
        """Whether the step is skipped. All ranks call it and get the same."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return False
        skipped = not isfinite(float(norm_of(gradients)))
        self._loss_scale.after(not skipped)
        if skipped:
            self._taken = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, _ in self._taken:
                parameter.grad = None
        return skipped

    def after_step(self) -> None:
        """Put the gradients back, which the loop may read."""
        for parameter, gradient in self._taken:
            parameter.grad = gradient
        self._taken = []
