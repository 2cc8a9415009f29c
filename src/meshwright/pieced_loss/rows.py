"""Cross entropy of rows of logits and its gradient, one piece of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

LARGEST = 1 << 28
"""Elements of a piece's logits: 1 GiB in fp32. Smaller pieces would take longer, because each one reads and writes the
gradient of the whole weight."""
FEWEST = 4
"""Pieces that rows are cut into at least."""
ALIGNED = 128
"""Rows of a piece are a multiple of this, where there are as many: matrix products are slower on odd sizes."""


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
    """Computes both; None: `plain_gradient`."""

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.part is not None:
            return _divided_softmax(logits, target, self.ignore_index, self.part)[0]
        return _plain_softmax(logits, target, self.ignore_index)[0]

    def gradient(self, logits: Tensor, target: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.part is not None:
            losses, shares = _divided_softmax(logits, target, self.ignore_index, self.part)
            return losses, _scaled(shares, target, self.ignore_index, scale, logits)
        return (self.run or plain_gradient)(logits, target, self.ignore_index, scale)


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


def _plain_softmax(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The losses, and the logarithms of the shares."""
    logarithms = torch.log_softmax(logits, -1, dtype=_wide(logits.dtype))
    ignored = target == ignore_index
    chosen = logarithms.gather(1, target.masked_fill(ignored, 0)[:, None]).squeeze(1)
    return chosen.neg().masked_fill(ignored, 0), logarithms


def plain_gradient(logits: Tensor, target: Tensor, ignore_index: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The losses, and the gradient of the logits in their memory."""
    losses, logarithms = _plain_softmax(logits, target, ignore_index)
    shares = logarithms.exp_()
    here = target.masked_fill(target == ignore_index, 0)[:, None]
    shares.scatter_(1, here, shares.gather(1, here) - 1)
    return losses, _scaled(shares, target, ignore_index, scale, logits)


def compiled_gradient() -> Gradient:
    """`plain_gradient` as few kernels that write no logits in fp32."""
    return torch.compile(_fused_gradient, dynamic=False)  # type: ignore[no-any-return]


def _fused_gradient(logits: Tensor, target: Tensor, ignore_index: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """`plain_gradient` without writes in place, for the compiler to fuse."""
    losses, logarithms = _plain_softmax(logits, target, ignore_index)
    ignored = target == ignore_index
    is_target = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    kept = (~ignored).to(logarithms.dtype) if scale is None else scale.to(logarithms.dtype).masked_fill(ignored, 0)
    return losses, ((logarithms.exp() - is_target.to(logarithms.dtype)) * kept[:, None]).to(logits.dtype)


def _divided_softmax(logits: Tensor, target: Tensor, ignore_index: int, part: ClassPart) -> tuple[Tensor, Tensor]:
    """The losses, and this rank's shares minus 1 at the targets that it holds."""
    values = logits.to(_wide(logits.dtype), copy=True)
    largest = values.amax(-1, keepdim=True)
    part.largest(largest)
    values.sub_(largest)
    here = target - part.rank * logits.shape[-1]
    ignored = target == ignore_index
    elsewhere = (here < 0) | (here >= logits.shape[-1]) | ignored
    here = here.masked_fill(elsewhere, 0)[:, None]
    chosen = values.gather(1, here).squeeze(1).masked_fill(elsewhere, 0)
    values.exp_()
    sums = torch.stack([values.sum(-1), chosen])
    part.sum(sums)
    shares = values.div_(sums[0][:, None])
    shares.scatter_(1, here, shares.gather(1, here) - (~elsewhere)[:, None].to(shares.dtype))
    return (sums[0].log() - sums[1]).masked_fill_(ignored, 0), shares


def _scaled(shares: Tensor, target: Tensor, ignore_index: int, scale: Tensor | None, out: Tensor) -> Tensor:
    """The rows times their scale, zero where the target is ignored, in the memory of the logits."""
    ignored = target == ignore_index
    kept = (~ignored).to(shares.dtype) if scale is None else scale.to(shares.dtype).masked_fill(ignored, 0)
    return torch.mul(shares, kept[:, None], out=out)


def pieces_of(rows: int, classes: int) -> list[slice]:
    """Rows in pieces of equal size, except that the last one may be smaller."""
    size = max(1, min(LARGEST // max(classes, 1), -(-rows // FEWEST)))
    size = -(-rows // -(-rows // size)) if rows else 1
    if size > ALIGNED:
        size = min(-(-size // ALIGNED) * ALIGNED, max(ALIGNED, LARGEST // classes // ALIGNED * ALIGNED))
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


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
    total = _zeros(operands, needs)
    losses = []
    for piece, rows, logits in operands.pieces():
        part = None if scale is None else scale[piece]
        own, change = loss.gradient(logits, target[piece], part)
        del logits  # the gradient may be in its memory
        losses.append(own)
        if total.rows is not None:
            torch.mm(change, operands.weight, out=total.rows[piece])
        if total.weight is not None:
            _add_product(total.weight, change, rows)
        if total.bias is not None:
            total.bias.add_(change.sum(0, dtype=total.bias.dtype))
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


def _zeros(operands: Operands, needs: Needs) -> Gradients:
    rows, weight, bias = operands.rows, operands.weight, operands.bias
    return Gradients(
        torch.empty_like(rows) if needs[0] else None,
        torch.zeros_like(weight, dtype=_wide(weight.dtype)) if needs[1] else None,
        torch.zeros_like(bias, dtype=_wide(bias.dtype)) if needs[2] and bias is not None else None,
    )


def _add_product(total: Tensor, change: Tensor, rows: Tensor) -> None:
    """Add a piece's share of the weight's gradient. The sum over pieces is in fp32."""
    if total.dtype == change.dtype:
        total.addmm_(change.t(), rows)
    elif total.is_cuda:
        torch.addmm(total, change.t(), rows, out_dtype=total.dtype, out=total)
    else:
        total.add_(change.t() @ rows)
