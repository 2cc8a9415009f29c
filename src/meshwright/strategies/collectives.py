"""Communication over a mesh axis that autograd can go through, on plain local tensors.

Autograd calls no `backward` for an input that needs no gradient, so nothing is sent for it. None but `PartialGradient`
returns a view of its input: autograd forbids to change such a result in place, and the model's author may.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 gave them new names, and torch 2.11 has the old ones only.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_in(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same on every rank; its gradient is the sum of what the ranks give."""
    return PartialGradient.apply(x, mesh)  # type: ignore[no-any-return]


def slice_in(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part along a dim; the gradient is gathered from the ranks' parts."""
    return Take.apply(x, dim, mesh)  # type: ignore[no-any-return]


def gather(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """The ranks' parts one after another along a dim; the gradient is this rank's part of the whole's."""
    return Join.apply(x, dim, 1, False, mesh)  # type: ignore[no-any-return]


def add_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares; each share's gradient is the sum's."""
    return AddUp.apply(x, mesh)  # type: ignore[no-any-return]


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
    """The whole of the ranks' parts. Its gradient is whole on every rank, or each rank has a share of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, pieces: int, shares: bool, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.pieces, ctx.shares, ctx.mesh = dim, pieces, shares, mesh
        return joined(x, dim, pieces, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        take = (
            _summed_part(gradient, ctx.dim, ctx.mesh) if ctx.shares else _own(gradient, ctx.dim, ctx.pieces, ctx.mesh)
        )
        return take, None, None, None, None


class PartialGradient(torch.autograd.Function):
    """A whole tensor of whose gradient each rank has a share."""

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
    if x.dtype == torch.bool:  # which not every backend sends
        return joined(x.view(torch.uint8), dim, pieces, mesh).view(torch.bool)
    gathered = x.new_empty(mesh.size(), *x.shape)
    all_gather(gathered.view(-1), x.contiguous().view(-1), group=mesh.get_group())
    by_rank = [own.chunk(pieces, dim) for own in gathered]
    return torch.cat([own[piece] for piece in range(pieces) for own in by_rank], dim)


def _summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # autograd's own tensors are not to be changed
    dist.all_reduce(x, group=mesh.get_group())
    return x


def _summed_part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    by_rank = torch.stack(x.chunk(mesh.size(), dim))
    own = x.new_empty(by_rank.shape[1:])
    reduce_scatter(own.view(-1), by_rank.view(-1), group=mesh.get_group())
    return own
