"""Take parts of tensors that ranks divide, join them, and sum shares. Autograd is not involved, but for `own_part`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.mesh_axis import axis_of
from meshwright.torch_private.collectives import gather_rows, sum_over, sum_row
from meshwright.torch_private.modes import without_torch_function


def own_part(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of each of a tensor's pieces, by functions that autograd differentiates."""
    axis = axis_of(mesh)
    if not axis.balanced:
        dim %= x.dim()
        own: torch.Tensor = x.unflatten(dim, (pieces, axis.size, -1)).select(dim + 1, axis.rank)
        return own.flatten(dim, dim + 1)
    each, last = 2 * axis.size, 2 * axis.size - 1
    chunks = x.chunk(pieces * each, dim)
    places = [piece * each + place for piece in range(pieces) for place in (axis.rank, last - axis.rank)]
    return torch.cat([chunks[place] for place in places], dim)


def own_copy(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of each of a tensor's pieces, as a tensor of its own."""
    axis = axis_of(mesh)
    with without_torch_function():
        if pieces == 1 and not axis.balanced:
            return take(x, dim, axis.rank, axis.size)
        return own_part(x, dim, pieces, mesh)


def joined(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    """The whole tensor from the ranks' parts of its pieces."""
    axis = axis_of(mesh)
    with without_torch_function():
        if pieces == 1 and not axis.balanced:
            return parts_joined(x, dim, axis.size, axis.name)
        if x.dtype == torch.bool:
            return joined(x.view(torch.uint8), dim, pieces, mesh).view(torch.bool)
        rows = gather_rows(x, axis.size, axis.name)
        if not axis.balanced:
            dim %= x.dim()
            by_piece: torch.Tensor = rows.unflatten(dim + 1, (pieces, -1)).movedim(0, dim + 1)
            return by_piece.flatten(dim, dim + 2)
        halves = [own.chunk(2 * pieces, dim) for own in rows]
        in_order = []
        for piece in range(pieces):
            in_order += [own[2 * piece] for own in halves] + [own[2 * piece + 1] for own in reversed(halves)]
        return torch.cat(in_order, dim)


def summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares."""
    with without_torch_function():
        return sum_over(x, axis_of(mesh).name)


def summed_part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the sum of the ranks' shares."""
    with without_torch_function():
        shape, dim = x.shape, dim % x.dim()
        ranks = axis_of(mesh).size
        if axis_of(mesh).balanced:
            chunks = x.chunk(2 * ranks, dim)
            rows = [torch.cat([chunks[rank], chunks[-1 - rank]], dim) for rank in range(ranks)]
            return _row_of_sum(torch.stack(rows), mesh)
        by_rank = x.reshape((*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :])).movedim(dim, 0)
        return _row_of_sum(by_rank, mesh)


def _row_of_sum(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    axis = axis_of(mesh)
    with without_torch_function():
        return sum_row(x, axis.size, axis.name)


def summed_together(tensors: Sequence[torch.Tensor], group: str) -> list[torch.Tensor]:
    """The sums over ranks of several tensors, by one message if they have one dtype."""
    if len(tensors) < 2 or len({x.dtype for x in tensors}) > 1:
        return [sum_over(x, group) for x in tensors]
    total = sum_over(torch.cat([x if x.dim() == 1 else x.flatten() for x in tensors]), group)
    parts = total.split_with_sizes([x.numel() for x in tensors])
    return [part if x.dim() == 1 else part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def take(x: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """A copy of a rank's part of a whole tensor."""
    return x.chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)


def parts_joined(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """The ranks' parts beside each other along a dim."""
    if x.dtype == torch.bool:  # not every backend sends it
        return parts_joined(x.view(torch.uint8), dim, ranks, group).view(torch.bool)
    shape, dim = x.shape, dim % x.dim()
    parts = gather_rows(x, ranks, group)  # then one copy, or none along dim 0
    return parts.movedim(0, dim).reshape((*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]))
