"""Cross entropy of rows of logits and its gradient, for one piece of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClassPart:
    """This rank's even part of the classes, which a group of ranks divides."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    def sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def largest(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)


Gradient = Callable[[Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor]]
"""(logits, target, ignored index, scale of each row) -> the losses and the gradient of the logits."""


class PieceLoss(Protocol):
    """Computes the losses of some rows."""

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of each row, zero where the target is ignored. The logits may be overwritten."""

    def gradient(self, logits: Tensor, target: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The losses, and the gradient of the logits, each row times its `scale`. The logits may be overwritten."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxLoss:
    """Plain cross entropy with class indices."""

    ignore_index: int
    part: ClassPart | None = None
    run: Gradient | None = None
    """A compiled kernel that computes both; None: operators, one after another."""

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        return _exponentials(logits, target, self.ignore_index, self.part).losses

    def gradient(self, logits: Tensor, target: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.run is not None and self.part is None:
            return self.run(logits, target, self.ignore_index, scale)
        found = _exponentials(logits, target, self.ignore_index, self.part)
        # The share is exp / sum, and the gradient is the share, minus 1 at the target.
        at_target = found.values.gather(1, found.here) - found.sums[:, None] * found.is_here[:, None]
        found.values.scatter_(1, found.here, at_target)
        factors = found.sums.reciprocal() if scale is None else scale.to(found.sums.dtype) / found.sums
        factors = factors.masked_fill(target == self.ignore_index, 0)
        return found.losses, torch.mul(found.values, factors[:, None], out=logits)


@dataclass(frozen=True)
class _Exponentials:
    """Of some rows, relative to each row's largest logit."""

    losses: Tensor
    values: Tensor
    sums: Tensor
    here: Tensor
    """The column of each target; 0 if the target is ignored or another rank's."""
    is_here: Tensor


def _exponentials(logits: Tensor, target: Tensor, ignore_index: int, part: ClassPart | None) -> _Exponentials:
    classes, wide = logits.shape[1], wide_dtype(logits.dtype)
    largest = logits.amax(1).to(wide)
    if part is not None:
        part.largest(largest)
    values = logits - largest[:, None]  # in fp32, without a copy of the logits
    here = target - (part.rank if part is not None else 0) * classes
    ignored = target == ignore_index
    elsewhere = ignored if part is None else ignored | (here < 0) | (here >= classes)
    here = here.masked_fill(elsewhere, 0)[:, None]
    chosen = values.gather(1, here).squeeze(1).masked_fill(elsewhere, 0)
    values.exp_()
    sums = torch.stack([values.sum(1), chosen])
    if part is not None:
        part.sum(sums)
    losses = (sums[0].log() - sums[1]).masked_fill_(ignored, 0)
    return _Exponentials(losses, values, sums[0], here, ~elsewhere)


@dataclass(frozen=True, kw_only=True)
class CalledLoss:
    """Any loss of rows, differentiated by autograd."""

    values: Callable[[Tensor], Tensor]
    """What the model does with the logits before the loss."""
    function: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.function(self.values(logits), target, reduction="none", **self.options)

    def gradient(self, logits: Tensor, target: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            losses = self.losses(leaf, target)
            total = losses.sum() if scale is None else (losses * scale).sum()
        return losses.detach(), torch.autograd.grad(total, leaf)[0]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over numbers of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def compiled_gradient() -> Gradient:
    """`SoftmaxLoss.gradient` as few kernels that write no logits in fp32."""
    return torch.compile(_fused_gradient, dynamic=False)


def _fused_gradient(logits: Tensor, target: Tensor, ignore_index: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same as `SoftmaxLoss.gradient` without writes in place, for the compiler to fuse."""
    logarithms = torch.log_softmax(logits, -1, dtype=wide_dtype(logits.dtype))
    ignored = target == ignore_index
    losses = logarithms.gather(1, target.masked_fill(ignored, 0)[:, None]).squeeze(1).neg().masked_fill(ignored, 0)
    is_target = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    kept = (~ignored).to(logarithms.dtype) if scale is None else scale.to(logarithms.dtype).masked_fill(ignored, 0)
    return losses, ((logarithms.exp() - is_target.to(logarithms.dtype)) * kept[:, None]).to(logits.dtype)
