"""An output layer and its loss, one piece of rows at a time: the losses and the gradients of the layer's operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.facts.pieces import piece_rows
from meshwright.pieced_loss.losses import ClassPart, PieceLoss, wide_dtype


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
        torch.empty_like(weight, dtype=wide_dtype(weight.dtype)) if needs[1] else None,  # the first piece writes it
        torch.zeros_like(bias, dtype=wide_dtype(bias.dtype)) if needs[2] and bias is not None else None,
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
