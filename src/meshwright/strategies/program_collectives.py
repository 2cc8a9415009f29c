"""Differentiable collectives that name their group, for recorded programs that are rewritten and may be compiled."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.strategies.parts import parts_joined, summed_together, take
from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.collectives import gather_rows as gathered_rows
from meshwright.torch_private.collectives import sum_over
from meshwright.torch_private.collectives import sum_row as summed_row
from meshwright.torch_private.modes import without_torch_function


class PartialGradients(torch.autograd.Function):
    """Whole tensors, of whose gradients each rank computes shares. Their sums are one message."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple([x.view_as(x) for x in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with without_torch_function():
            return None, *summed_together(gradients, ctx.group)


class GatherRows(torch.autograd.Function):
    """The ranks' parts below each other, [ranks, ...]; each rank has a share of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        ctx.ranks, ctx.group = ranks, group
        return gathered_rows(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with without_torch_function():
            return summed_row(gradient, ctx.ranks, ctx.group), None, None


class AddUpRows(torch.autograd.Function):
    """This rank's row of the sum of the ranks' shares of [ranks, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        ctx.ranks, ctx.group = ranks, group
        return summed_row(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with without_torch_function():
            return gathered_rows(gradient, ctx.ranks, ctx.group), None, None


class AddUpAll(torch.autograd.Function):
    """The sum of the ranks' shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class GatherParts(torch.autograd.Function):
    """The ranks' parts beside each other along a dim; the gradient is this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, rank: int, ranks: int, group: str) -> torch.Tensor:
        ctx.dim, ctx.rank, ctx.ranks = dim, rank, ranks
        return parts_joined(x, dim, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        with without_torch_function():
            return take(gradient, ctx.dim, ctx.rank, ctx.ranks), None, None, None, None


class TakePart(torch.autograd.Function):
    """This rank's part of a whole tensor; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, rank: int, ranks: int, group: str) -> torch.Tensor:
        ctx.dim, ctx.ranks, ctx.group = dim, ranks, group
        return take(x, dim, rank, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        with without_torch_function():
            return parts_joined(gradient, ctx.dim, ctx.ranks, ctx.group), None, None, None, None


copy_all_in, gather_rows = direct_apply(PartialGradients), direct_apply(GatherRows)
add_up_all, add_up_rows = direct_apply(AddUpAll), direct_apply(AddUpRows)
gather_parts, take_part = direct_apply(GatherParts), direct_apply(TakePart)
