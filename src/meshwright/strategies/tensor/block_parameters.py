"""A block's parameters as its program reads them: one autograd function for all of them.

Backward runs one Python function per block for what would be several: the sum over ranks of the gradients of whole
parameters, and the division of a joint product's gradient into those of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.strategies.parts import summed_together
from meshwright.strategies.tensor.product import joined
from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.modes import without_torch_function

Gradient = Tensor | None


class BlockParameters(torch.autograd.Function):
    """Whole parameters, of whose gradients ranks compute shares, and then parameters joined row below row."""

    @staticmethod
    def forward(
        ctx: Any, group: str, whole: int, rows: tuple[tuple[int, ...], ...], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """The first `whole` parameters stay alone; `rows` has the rows of each part of each joined one."""
        ctx.set_materialize_grads(False)
        ctx.group, ctx.whole, ctx.rows = group, whole, rows
        found = [x.view_as(x) for x in parameters[:whole]]
        first = whole
        for parts in rows:
            found.append(joined(parameters[first : first + len(parts)]))
            first += len(parts)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Gradient) -> tuple[Gradient, ...]:
        with without_torch_function():
            return None, None, None, *_summed(gradients[: ctx.whole], ctx.group), *_divided(gradients, ctx)


def _summed(gradients: tuple[Gradient, ...], group: str) -> Iterator[Gradient]:
    """Ranks run the same program, so they miss the same gradients."""
    found = iter(summed_together([x for x in gradients if x is not None], group))
    return (None if x is None else next(found) for x in gradients)


def _divided(gradients: tuple[Gradient, ...], ctx: Any) -> Iterator[Gradient]:
    for gradient, rows in zip(gradients[ctx.whole :], ctx.rows, strict=True):
        yield from [None] * len(rows) if gradient is None else gradient.split_with_sizes(rows)


block_parameters = direct_apply(BlockParameters)
