"""Cross entropy of rows of logits and its gradient, one piece of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.facts.pieces import piece_rows


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
    classes, wide = logits.shape[1], _wide(logits.dtype)
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def compiled_gradient() -> Gradient:
    """`SoftmaxLoss.gradient` as few kernels that write no logits in fp32."""
    return torch.compile(_fused_gradient, dynamic=False)


def _fused_gradient(logits: Tensor, target: Tensor, ignore_index: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same as `SoftmaxLoss.gradient` without writes in place, for the compiler to fuse."""
    logarithms = torch.log_softmax(logits, -1, dtype=_wide(logits.dtype))
    ignored = target == ignore_index
    losses = logarithms.gather(1, target.masked_fill(ignored, 0)[:, None]).squeeze(1).neg().masked_fill(ignored, 0)
    is_target = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    kept = (~ignored).to(logarithms.dtype) if scale is None else scale.to(logarithms.dtype).masked_fill(ignored, 0)
    return losses, ((logarithms.exp() - is_target.to(logarithms.dtype)) * kept[:, None]).to(logits.dtype)


def pieces_of(rows: int, classes: int) -> list[slice]:
    """Rows in pieces of equal size, except that the last one may be smaller."""
    size = piece_rows(rows, classes)
    return [slice(first, min(first + size, rows)) for first in range(0, max(rows, 1), size)]


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Rows of hidden states and the layer that turns them into logits."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    part: ClassPart | None = None
    """Which part of the layer's classes this rank holds; None: all."""

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For each piece: its place, its rows and its logits."""
        for piece in pieces_of(len(self.rows), len(self.weight)):
            own = self.rows[piece]
            yield piece, own, F.linear(own, self.weight, self.bias)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the operands; None for those that need none."""

    rows: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def times(self, scale: Tensor | None, like: Operands) -> Gradients:
        """In the dtypes of the operands; the sums over pieces are in fp32."""
        weight = None if self.weight is None else _times(self.weight, scale, like.weight.dtype)
        bias = None if self.bias is None or like.bias is None else _times(self.bias, scale, like.bias.dtype)
        return Gradients(None if self.rows is None else _times(self.rows, scale, like.rows.dtype), weight, bias)


def _times(tensor: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return tensor.to(dtype)
    return torch.mul(tensor, scale, out=torch.empty_like(tensor, dtype=dtype))


Needs = tuple[bool, bool, bool]
"""Which of rows, weight and bias need a gradient."""


def losses_of(operands: Operands, target: Tensor, loss: PieceLoss) -> Tensor:
    """The loss of every row."""
    return torch.cat([loss.losses(logits, target[piece]) for piece, _, logits in operands.pieces()])


def differentiate(
    operands: Operands, target: Tensor, loss: PieceLoss, needs: Needs, scale: Tensor | None = None
) -> tuple[Tensor, Gradients]:
    """The loss of every row, and the gradients of the sum of `scale` times the losses."""
    total = _sums(operands, needs)
    losses = []
    for piece, rows, logits in operands.pieces():
        part = None if scale is None else scale[piece]
        own, change = loss.gradient(logits, target[piece], part)
        losses.append(own)
        if total.rows is not None:
            torch.mm(change, operands.weight, out=total.rows[piece])
        if total.weight is not None:
            _add_product(total.weight, change, rows, first=piece.start == 0)
        if total.bias is not None:
            total.bias.add_(change.sum(0, dtype=total.bias.dtype))
        del logits, change  # before the next piece is computed
    return torch.cat(losses), total


def of_whole(operands: Operands, change: Tensor, needs: Needs) -> Gradients:
    """Gradients of the operands from the gradient of all logits."""
    if operands.part is not None and change.shape[1] != len(operands.weight):
        change = change.chunk(operands.part.ranks, 1)[operands.part.rank]
    return Gradients(
        change @ operands.weight if needs[0] else None,
        change.t() @ operands.rows if needs[1] else None,
        change.sum(0) if needs[2] else None,
    )


def _sums(operands: Operands, needs: Needs) -> Gradients:
    rows, weight, bias = operands.rows, operands.weight, operands.bias
    return Gradients(
        torch.empty_like(rows) if needs[0] else None,
        torch.empty_like(weight, dtype=_wide(weight.dtype)) if needs[1] else None,  # the first piece writes it
        torch.zeros_like(bias, dtype=_wide(bias.dtype)) if needs[2] and bias is not None else None,
    )


def _add_product(total: Tensor, change: Tensor, rows: Tensor, *, first: bool) -> None:
    """Add a piece's share of the weight's gradient, or write the first one. The sum over pieces is in fp32."""
    kept = 0 if first else 1  # with 0, the old content is not read
    if total.dtype == change.dtype:
        total.addmm_(change.t(), rows, beta=kept)
    elif total.is_cuda and _adds_in_fp32(total.device, change.dtype, type(total)):
        torch.addmm(total, change.t(), rows, out_dtype=total.dtype, beta=kept, out=total)
    elif first:
        total.copy_(change.t() @ rows)
    else:
        total.add_(change.t() @ rows)


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype, kind: type) -> bool:
    """Whether this build of PyTorch adds a product of 16-bit matrices to an fp32 one; `kind` is the tensors' class."""
    total, factor = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, beta=0, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
