"""The result of one optimizer step, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The loss's sum and weight and the wish to stop, while they are summed over ranks."""

    local: torch.Tensor
    """This rank's own sum, to find the rank whose loss is not finite."""
    summed: torch.Tensor
    """Sum, weight and the number of ranks that wish to stop (not in `evaluate`); valid after `wait`."""
    work: dist.Work | None
    known_weight: float | None
    """The global weight, if it follows from shapes."""

    @property
    def weight(self) -> float | torch.Tensor:
        self.wait()
        return self.summed[1] if self.known_weight is None else self.known_weight

    @property
    def mean(self) -> torch.Tensor:
        self.wait()
        return self.summed[0] / self.weight

    @cached_property
    def read(self) -> torch.Tensor:
        """`summed` on the CPU: one copy from the device for the loss and the wish to stop."""
        self.wait()
        return self.summed.cpu()

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step, the same on every rank. Numbers stay on the device until they are read."""

    step: int
    samples: int
    lr: float
    totals: Totals
    norm_tensor: torch.Tensor
    skipped: bool = False
    """Whether fp16 gradients overflowed, so that nothing was updated."""
    ends_epoch: int | None = None
    """The number of epochs completed with this step; None if more steps of the epoch follow."""

    @property
    def loss_tensor(self) -> torch.Tensor:
        return self.totals.mean

    @property
    def loss(self) -> float:
        read, known = self.totals.read, self.totals.known_weight
        return float(read[0] / (read[1] if known is None else known))

    @property
    def stop(self) -> bool:
        """Whether any rank wished to stop before this step, so that all ranks stop after the same step."""
        return bool(self.totals.read[2])

    @property
    def grad_norm(self) -> float:
        return float(self.norm_tensor)
