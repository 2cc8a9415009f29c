"""Where a tensor lies inside a model that is divided over a tensor axis.

There are two ways only. A tensor is plain, and then it is whole and the same on every rank of the axis; or it is a
`DTensor` that carries this rank's even part along one dim. Nothing here is replicated or partial in DTensor's sense, so
nobody has to ask what an operator does to that.

A part and its gradient lie alike. What is whole has a whole gradient: where a rank sees only its share of that
gradient, the shares are summed on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.strategies.collectives import AddUp, AddUpPart, Join, PartialGradient, Take
from meshwright.strategies.tensor.memory import check_unchanged

SEQUENCE = 1  # the dim of the sequence in (batch, sequence, width)
_PIECES = "_meshwright_pieces"


def is_divided(x: object, mesh: DeviceMesh) -> TypeGuard[DTensor]:
    """Whether it is a part on this axis; a data strategy's own DTensors lie on other meshes."""
    return isinstance(x, DTensor) and x.device_mesh == mesh and type(x.placements[0]) is Shard


def dim_of(x: DTensor) -> int:
    """The dim along which it is divided."""
    placement = x.placements[0]
    assert isinstance(placement, Shard)
    return placement.dim % x.dim()


def pieces_of(x: DTensor) -> int:
    """Of how many pieces, each divided by itself, a fused tensor is; 1 for all others."""
    return int(x.__dict__.get(_PIECES, 1))


def divided(local: torch.Tensor, dim: int, mesh: DeviceMesh, pieces: int = 1) -> DTensor:
    """The ranks' parts as one tensor."""
    carrier: DTensor = _Carry.apply(local, dim % local.dim(), pieces, mesh)
    if pieces > 1:
        carrier.__dict__[_PIECES] = pieces
    return carrier


class _Carry(torch.autograd.Function):
    """Puts a part into its carrier. An author's own autograd function may give a whole gradient for a carrier."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> DTensor:
        ctx.dim, ctx.pieces, ctx.mesh = dim, pieces, mesh
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if is_divided(gradient, ctx.mesh) and dim_of(gradient) == ctx.dim:
            return gradient.to_local(), None, None, None
        pieces = whole(gradient, ctx.mesh).chunk(ctx.pieces, ctx.dim)
        own = [part(piece, ctx.dim, ctx.mesh) for piece in pieces]
        return torch.cat(own, ctx.dim) if ctx.pieces > 1 else own[0], None, None, None


def local(x: DTensor) -> torch.Tensor:
    """What this rank holds of a divided tensor, in the order in which it holds it."""
    check_unchanged(x)
    return x.to_local()


def part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a tensor along a dim."""
    dim %= x.dim()
    if is_divided(x, mesh) and dim_of(x) == dim and pieces_of(x) == 1:
        return local(x)
    if x.shape[dim] % mesh.size():
        raise ValueError(f"{mesh.size()} ranks cannot divide dim {dim} of a tensor of shape {tuple(x.shape)}.")
    return Take.apply(whole(x, mesh), dim, mesh)  # type: ignore[no-any-return]


def whole(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole tensor on every rank."""
    if not is_divided(x, mesh):
        return x
    return Join.apply(local(x), dim_of(x), pieces_of(x), False, mesh)  # type: ignore[no-any-return]


def shared(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A whole tensor, for a computation in which each rank finds its own share of the gradient."""
    if is_divided(x, mesh) and pieces_of(x) == 1:
        return Join.apply(local(x), dim_of(x), 1, True, mesh)  # type: ignore[no-any-return]
    x = whole(x, mesh)
    return PartialGradient.apply(x, mesh) if x.requires_grad and torch.is_grad_enabled() else x


def add_up(share: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares, on every rank."""
    return AddUp.apply(share, mesh)  # type: ignore[no-any-return]


def settle(share: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares, in the layout that the residual stream has."""
    if _along_sequence.get() and has_sequence(share, mesh):
        return divided(AddUpPart.apply(share, SEQUENCE, mesh), SEQUENCE, mesh)
    return add_up(share, mesh)


_along_sequence: ContextVar[bool] = ContextVar("along_sequence", default=False)


@contextmanager
def along_sequence(wanted: bool) -> Iterator[None]:
    """Layers that add up shares meanwhile leave the sum divided along the sequence, where that is wanted and can be."""
    token = _along_sequence.set(wanted)
    try:
        yield
    finally:
        _along_sequence.reset(token)


def has_sequence(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether it is (batch, sequence, width), with a sequence that the ranks can divide."""
    return x.dim() == 3 and x.shape[SEQUENCE] % mesh.size() == 0
