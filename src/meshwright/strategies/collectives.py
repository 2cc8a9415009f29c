"""Differentiable collectives over a mesh axis, on plain local tensors.

Autograd calls no `backward` for an input that needs no gradient, so nothing is sent for it. Only `PartialGradient`
returns a view of its input: autograd forbids in-place changes of such a result, and a model may make them. No function
mode sees what they do: in backward one is active for blocks that are recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.parts import joined, own_copy, summed, summed_part
from meshwright.strategies.recorder import noted
from meshwright.torch_private.autograd import direct_apply

# torch 2.13 renamed them.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_in(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A whole tensor for use on every rank; its gradient is the sum over ranks."""
    return noted(COPY_IN, x, mesh)  # type: ignore[no-any-return]


def slice_in(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part along a dim; the gradient is gathered."""
    return noted(TAKE, x, dim, mesh)  # type: ignore[no-any-return]


def gather(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """The ranks' parts concatenated along a dim; the gradient is this rank's part."""
    return join(x, dim, 1, False, mesh)


def join(x: torch.Tensor, dim: int, pieces: int, shares: bool, mesh: DeviceMesh) -> torch.Tensor:
    """The whole tensor from the ranks' parts of its pieces; with `shares`, ranks compute shares of its gradient."""
    return noted(JOIN, x, dim, pieces, shares, mesh)  # type: ignore[no-any-return]


def add_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares, on every rank; each share gets the sum's gradient."""
    return noted(ADD_UP, x, mesh)  # type: ignore[no-any-return]


def add_up_part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the sum of the ranks' shares along a dim; the gradient is gathered."""
    return noted(ADD_UP_PART, x, dim, mesh)  # type: ignore[no-any-return]


class Take(torch.autograd.Function):
    """This rank's part of a whole tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return own_copy(x, dim, 1, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return joined(gradient, ctx.dim, 1, ctx.mesh), None, None


class Join(torch.autograd.Function):
    """The whole tensor from the ranks' parts. With `shares`, each rank has a share of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, pieces: int, shares: bool, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.pieces, ctx.shares, ctx.mesh = dim, pieces, shares, mesh
        return joined(x, dim, pieces, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if ctx.shares:
            return summed_part(gradient, ctx.dim, ctx.mesh), None, None, None, None
        return own_copy(gradient, ctx.dim, ctx.pieces, ctx.mesh), None, None, None, None


class PartialGradient(torch.autograd.Function):
    """A whole tensor; each rank computes a share of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.mesh), None


class AddUp(torch.autograd.Function):
    """The sum of the ranks' shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return summed(x, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class AddUpPart(torch.autograd.Function):
    """This rank's part of the sum of the ranks' shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return summed_part(x, dim, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return joined(gradient, ctx.dim, 1, ctx.mesh), None, None


TAKE = direct_apply(Take)
COPY_IN, JOIN = direct_apply(PartialGradient), direct_apply(Join)
ADD_UP, ADD_UP_PART = direct_apply(AddUp), direct_apply(AddUpPart)
"""What programs have in place of `slice_in`, `copy_in`, `join`, `add_up` and `add_up_part`."""
