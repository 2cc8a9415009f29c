"""Cross entropy of `Logits`, in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.pieced_loss.gradient import Computed, Later, rows_and_back
from meshwright.pieced_loss.logits import LOSSES, Logits, like, pieced_gradient
from meshwright.pieced_loss.recorded import functions
from meshwright.pieced_loss.rows import (
    CalledLoss,
    Gradients,
    Operands,
    PieceLoss,
    SoftmaxLoss,
    differentiate,
    losses_of,
)

SCALED = (torch.float16,)
"""Dtypes whose gradients need the loss scale before they are rounded, which only backward knows."""


def cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` in pieces; NotImplemented for arguments that it does not handle."""
    if size_average is not None or reduce is not None or not _fits(input, target, weight):
        return NotImplemented
    form, source = input.form, input.source
    if weight is None and label_smoothing == 0.0 and form.widens:
        loss: PieceLoss = SoftmaxLoss(ignore_index=ignore_index, part=source.part, run=source.gradient)
    elif source.part is not None:
        return NotImplemented
    else:
        options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        loss = CalledLoss(values=form.to_values, function=F.cross_entropy, options=options)
    return _in_pieces(input, target, loss, _Reduction(reduction, ignore_index, weight))


def nll_loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """`F.nll_loss` in pieces; NotImplemented for arguments that it does not handle."""
    if (
        size_average is not None
        or reduce is not None
        or not _fits(input, target, weight)
        or input.source.part is not None
    ):
        return NotImplemented
    options = {"weight": weight, "ignore_index": ignore_index}
    loss = CalledLoss(values=input.form.to_values, function=F.nll_loss, options=options)
    return _in_pieces(input, target, loss, _Reduction(reduction, ignore_index, weight))


def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """`torch.logsumexp` over the classes, as a z-loss takes it."""
    return _over_classes(input, dim, keepdim, lambda logits: torch.logsumexp(logits, -1))


def argmax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """`torch.argmax` over the classes, for an accuracy."""
    return _over_classes(input, dim, keepdim, lambda logits: logits.argmax(-1), differentiable=False)


def _over_classes(
    input: Any, dim: Any, keepdim: bool, run: Callable[[Tensor], Tensor], *, differentiable: bool = True
) -> Any:
    """A function that gives one number for each row."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    last = isinstance(dim, int) and dim % len(input.form.shape) == len(input.form.shape) - 1
    if not last or input.form.classes_second or input.source.part is not None:
        return NotImplemented
    leading = input.form.shape[:-1]
    loss = CalledLoss(values=input.form.to_values, function=lambda logits, target, reduction: run(logits))
    rows = torch.zeros(prod(leading), dtype=torch.long, device=input.source.hidden.device)  # no row is ignored
    found = _EachLoss.apply(input, rows, loss) if differentiable else losses_of(_rows_of(input)[0], rows, loss)
    return found.reshape(*leading, 1) if keepdim else found.reshape(leading)


LOSSES |= {F.cross_entropy: cross_entropy, F.nll_loss: nll_loss}
LOSSES |= dict.fromkeys(functions("logsumexp"), logsumexp) | dict.fromkeys(functions("argmax"), argmax)


def _fits(input: Any, target: Any, weight: Tensor | None) -> bool:
    """Whether the classes are where the loss expects them, and the targets are class indices of every row."""
    if weight is not None and weight.requires_grad:
        return False
    if not isinstance(input, Logits) or not isinstance(target, Tensor) or target.is_floating_point():
        return False
    shape, second = input.form.shape, input.form.classes_second
    rows = (shape[0], shape[2]) if second else shape[:-1]
    return (second or len(shape) == 2) and tuple(target.shape) == rows and target.device == input.source.hidden.device


@dataclass(frozen=True)
class _Reduction:
    kind: str
    ignore_index: int
    weight: Tensor | None

    def divisor(self, target: Tensor) -> Tensor | None:
        """What a mean divides the sum by."""
        if self.kind != "mean":
            return None
        kept = target != self.ignore_index
        if self.weight is None:
            return kept.sum()
        return self.weight[target.masked_fill(~kept, 0)].masked_fill(~kept, 0).sum()


def _in_pieces(logits: Logits, target: Tensor, loss: PieceLoss, reduction: _Reduction) -> Any:
    if reduction.kind not in ("mean", "sum", "none"):
        return NotImplemented
    if reduction.kind == "none":
        found = _EachLoss.apply(logits, target.reshape(-1), loss)
        return found.reshape(target.shape)
    total = _TotalLoss.apply(logits, target.reshape(-1), loss)
    divisor = reduction.divisor(target)
    return total if divisor is None else total / divisor


def _rows_of(logits: Logits) -> tuple[Operands, Any]:
    operands = logits.source.operands()
    rows, back = rows_and_back(operands.rows, logits.form.to_rows)
    return Operands(rows=rows, weight=operands.weight, bias=operands.bias, part=operands.part), back


def _needs(logits: Logits) -> tuple[bool, bool, bool]:
    source = logits.source
    bias = source.bias is not None and source.bias.requires_grad
    return source.hidden.requires_grad, source.weight.requires_grad, bias


class _TotalLoss(torch.autograd.Function):
    """The sum of all losses. Forward computes the gradients too, up to the factor that backward brings."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, target: Tensor, loss: PieceLoss) -> Tensor:
        ctx.like, ctx.form, ctx.loss = like(logits), logits.form, loss
        operands, back = _rows_of(logits)
        ctx.later = operands.rows.dtype in SCALED
        if not ctx.needs_input_grad[0] or ctx.later:
            ctx.save_for_backward(target)
            return losses_of(operands, target, loss).sum().to(logits.form.dtype)
        losses, found = differentiate(operands, target, loss, _needs(logits))
        ctx.save_for_backward(None if found.rows is None else back(found.rows), found.weight, found.bias)
        return losses.sum().to(logits.form.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        if ctx.later:
            (target,) = ctx.saved_tensors
            return (
                pieced_gradient(ctx.like, Later(ctx.form.to_rows, target, ctx.loss, factor.expand(target.shape))),
                None,
                None,
            )
        return pieced_gradient(ctx.like, Computed(Gradients(*ctx.saved_tensors), factor)), None, None


class _EachLoss(torch.autograd.Function):
    """The loss of each row. Rows may have different factors in backward, which computes the pieces again."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, target: Tensor, loss: PieceLoss) -> Tensor:
        ctx.like, ctx.form, ctx.loss = like(logits), logits.form, loss
        ctx.save_for_backward(target)
        return losses_of(_rows_of(logits)[0], target, loss).to(logits.form.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor, None, None]:
        (target,) = ctx.saved_tensors
        return pieced_gradient(ctx.like, Later(ctx.form.to_rows, target, ctx.loss, factors)), None, None
