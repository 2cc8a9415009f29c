"""Cross entropy of `Logits`, in pieces."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.pieced_loss.arguments import LossArguments
from meshwright.pieced_loss.gradient import Computed, Later, rows_and_back
from meshwright.pieced_loss.logits import LOSSES, Logits, like, pieced_gradient
from meshwright.pieced_loss.losses import CalledLoss, PieceLoss, SoftmaxLoss
from meshwright.pieced_loss.recorded import functions
from meshwright.pieced_loss.rows import Gradients, Operands, differentiate, losses_of

SCALED = (torch.float16,)
"""Dtypes whose gradients need the loss scale before they are rounded, which only backward knows."""


def cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """`F.cross_entropy` in pieces; NotImplemented for arguments that it does not handle."""
    given = LossArguments(*args, **kwargs)
    if not _fits(given):
        return NotImplemented
    form, source = given.input.form, given.input.source
    if given.is_plain and form.widens:
        loss = SoftmaxLoss(ignore_index=given.ignore_index, part=source.part, run=source.gradient)
        return _in_pieces(given, loss)
    if source.part is not None:
        return NotImplemented
    options = {"weight": given.weight, "ignore_index": given.ignore_index, "label_smoothing": given.label_smoothing}
    return _in_pieces(given, CalledLoss(values=form.to_values, function=F.cross_entropy, options=options))


def nll_loss(*args: Any, **kwargs: Any) -> Any:
    """`F.nll_loss` in pieces; NotImplemented for arguments that it does not handle."""
    given = LossArguments(*args, **kwargs)
    if not _fits(given) or given.input.source.part is not None or given.label_smoothing:
        return NotImplemented
    options = {"weight": given.weight, "ignore_index": given.ignore_index}
    return _in_pieces(given, CalledLoss(values=given.input.form.to_values, function=F.nll_loss, options=options))


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


def _fits(given: LossArguments) -> bool:
    """Whether the classes are where the loss expects them, and the targets are class indices of every row."""
    if given.is_deprecated or (given.weight is not None and given.weight.requires_grad):
        return False
    input, target = given.input, given.target
    if not isinstance(input, Logits) or not given.has_indices:
        return False
    shape, second = input.form.shape, input.form.classes_second
    rows = (shape[0], shape[2]) if second else shape[:-1]
    return (second or len(shape) == 2) and tuple(target.shape) == rows and target.device == input.source.hidden.device


def _in_pieces(given: LossArguments, loss: PieceLoss) -> Any:
    logits, target = given.input, given.target
    if given.reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if given.reduction == "none":
        return _EachLoss.apply(logits, target.reshape(-1), loss).reshape(target.shape)
    total = _TotalLoss.apply(logits, target.reshape(-1), loss)
    return total / _divisor(given) if given.reduction == "mean" else total


def _divisor(given: LossArguments) -> Tensor:
    """What a mean divides the sum by."""
    kept: Tensor = given.target != given.ignore_index
    if given.weight is None:
        return kept.sum()
    return given.weight[given.target.masked_fill(~kept, 0)].masked_fill(~kept, 0).sum()


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
