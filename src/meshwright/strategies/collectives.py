"""Differentiable collectives over a mesh axis, on plain local tensors.

Autograd calls no `backward` for an input that needs no gradient, so nothing is sent for it. Only `PartialGradient`
returns a view of its input: autograd forbids in-place changes of such a result, and a model may make them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.recorder import noted

# torch 2.13 renamed them.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_in(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A whole tensor for use on every rank; its gradient is the sum over ranks."""
    return noted(_partial_gradient, x, mesh)  # type: ignore[no-any-return]


def slice_in(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part along a dim; the gradient is gathered."""
    return noted(_take, x, dim, mesh)  # type: ignore[no-any-return]


def gather(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """The ranks' parts concatenated along a dim; the gradient is this rank's part."""
    return join(x, dim, 1, False, mesh)


def join(x: torch.Tensor, dim: int, pieces: int, shares: bool, mesh: DeviceMesh) -> torch.Tensor:
    """The whole tensor from the ranks' parts of its pieces; with `shares`, ranks compute shares of its gradient."""
    return noted(_join, x, dim, pieces, shares, mesh)  # type: ignore[no-any-return]


def add_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares, on every rank; each share gets the sum's gradient."""
    return noted(_add_up, x, mesh)  # type: ignore[no-any-return]


def add_up_part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the sum of the ranks' shares along a dim; the gradient is gathered."""
    return noted(_add_up_part, x, dim, mesh)  # type: ignore[no-any-return]


class Take(torch.autograd.Function):
    """This rank's part of a whole tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _own(x, dim, 1, mesh)

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
            return _summed_part(gradient, ctx.dim, ctx.mesh), None, None, None, None
        return _own(gradient, ctx.dim, ctx.pieces, ctx.mesh), None, None, None, None


class PartialGradient(torch.autograd.Function):
    """A whole tensor; each rank computes a share of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.mesh), None


class AddUp(torch.autograd.Function):
    """The sum of the ranks' shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _summed(x, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class AddUpPart(torch.autograd.Function):
    """This rank's part of the sum of the ranks' shares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _summed_part(x, dim, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return joined(gradient, ctx.dim, 1, ctx.mesh), None, None


def _own(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    own = [piece.chunk(mesh.size(), dim)[mesh.get_local_rank()] for piece in x.chunk(pieces, dim)]
    return torch.cat(own, dim) if pieces > 1 else own[0].clone(memory_format=torch.contiguous_format)


def joined(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    if x.dtype == torch.bool:  # not every backend sends it
        return joined(x.view(torch.uint8), dim, pieces, mesh).view(torch.bool)
    gathered = x.new_empty(mesh.size(), *x.shape)
    all_gather(gathered.view(-1), x.contiguous().view(-1), group=mesh.get_group())
    if pieces == 1:
        return torch.cat(gathered.unbind(0), dim)
    by_rank = [own.chunk(pieces, dim) for own in gathered]
    return torch.cat([own[piece] for piece in range(pieces) for own in by_rank], dim)


def _summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # autograd's tensors must not change
    dist.all_reduce(x, group=mesh.get_group())
    return x


def _summed_part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    by_rank = torch.stack(x.chunk(mesh.size(), dim))
    own = x.new_empty(by_rank.shape[1:])
    reduce_scatter(own.view(-1), by_rank.view(-1), group=mesh.get_group())
    return own


# Programs keep them, so they must not be what a recorder puts in the place of `apply` for a while.
_partial_gradient, _take, _join = PartialGradient.apply, Take.apply, Join.apply
_add_up, _add_up_part = AddUp.apply, AddUpPart.apply
