"""Differentiable collectives over a mesh axis, on plain local tensors.

Autograd calls no `backward` for an input that needs no gradient, so nothing is sent for it. Only `PartialGradient`
returns a view of its input: autograd forbids in-place changes of such a result, and a model may make them. No function
mode sees what they do: in backward one is active for blocks that are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.recorder import noted
from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.collectives import gather_rows as gathered_rows
from meshwright.torch_private.collectives import sum_over
from meshwright.torch_private.collectives import sum_row as summed_row
from meshwright.torch_private.modes import without_torch_function

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
        return _parts_joined(x, dim, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        with without_torch_function():
            return _part(gradient, ctx.dim, ctx.rank, ctx.ranks), None, None, None, None


class TakePart(torch.autograd.Function):
    """This rank's part of a whole tensor; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, rank: int, ranks: int, group: str) -> torch.Tensor:
        ctx.dim, ctx.ranks, ctx.group = dim, ranks, group
        return _part(x, dim, rank, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        with without_torch_function():
            return _parts_joined(gradient, ctx.dim, ctx.ranks, ctx.group), None, None, None, None


def _part(x: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    return x.chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)


def _parts_joined(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    if x.dtype == torch.bool:  # not every backend sends it
        return _parts_joined(x.view(torch.uint8), dim, ranks, group).view(torch.bool)
    shape, dim = x.shape, dim % x.dim()
    parts = gathered_rows(x, ranks, group)  # then one copy, or none along dim 0
    return parts.movedim(0, dim).reshape((*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]))


def own_part(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of each of a tensor's pieces, by functions that autograd differentiates."""
    axis = _axis_of(mesh)
    if not axis.balanced:
        return torch.cat([piece.chunk(axis.size, dim)[axis.rank] for piece in x.chunk(pieces, dim)], dim)
    each, last = 2 * axis.size, 2 * axis.size - 1
    chunks = x.chunk(pieces * each, dim)
    places = [piece * each + place for piece in range(pieces) for place in (axis.rank, last - axis.rank)]
    return torch.cat([chunks[place] for place in places], dim)


def _own(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    axis = _axis_of(mesh)
    with without_torch_function():
        if axis.balanced:
            return own_part(x, dim, pieces, mesh)
        if pieces == 1:
            return _part(x, dim, axis.rank, axis.size)
        return torch.cat([piece.chunk(axis.size, dim)[axis.rank] for piece in x.chunk(pieces, dim)], dim)


def joined(x: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> torch.Tensor:
    axis = _axis_of(mesh)
    with without_torch_function():
        if pieces == 1 and not axis.balanced:
            return _parts_joined(x, dim, axis.size, axis.name)
        if x.dtype == torch.bool:
            return joined(x.view(torch.uint8), dim, pieces, mesh).view(torch.bool)
        rows = gathered_rows(x, axis.size, axis.name)
        if not axis.balanced:
            by_rank = [own.chunk(pieces, dim) for own in rows]
            return torch.cat([own[piece] for piece in range(pieces) for own in by_rank], dim)
        halves = [own.chunk(2 * pieces, dim) for own in rows]
        in_order = []
        for piece in range(pieces):
            in_order += [own[2 * piece] for own in halves] + [own[2 * piece + 1] for own in reversed(halves)]
        return torch.cat(in_order, dim)


def _summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    with without_torch_function():
        return sum_over(x, _axis_of(mesh).name)


def summed_together(tensors: Sequence[torch.Tensor], group: str) -> list[torch.Tensor]:
    """The sums over ranks of several tensors, by one message if they have one dtype."""
    if len(tensors) < 2 or len({x.dtype for x in tensors}) > 1:
        return [sum_over(x, group) for x in tensors]
    total = sum_over(torch.cat([x if x.dim() == 1 else x.flatten() for x in tensors]), group)
    parts = total.split_with_sizes([x.numel() for x in tensors])
    return [part if x.dim() == 1 else part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _summed_part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    with without_torch_function():
        shape, dim = x.shape, dim % x.dim()
        ranks = _axis_of(mesh).size
        if _axis_of(mesh).balanced:
            chunks = x.chunk(2 * ranks, dim)
            rows = [torch.cat([chunks[rank], chunks[-1 - rank]], dim) for rank in range(ranks)]
            return _summed_row(torch.stack(rows), mesh)
        by_rank = x.reshape((*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :])).movedim(dim, 0)
        return _summed_row(by_rank, mesh)


def _summed_row(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    axis = _axis_of(mesh)
    with without_torch_function():
        return summed_row(x, axis.size, axis.name)


@dataclass(frozen=True)
class _Axis:
    """What a collective asks of a mesh; the mesh takes microseconds to answer."""

    size: int
    rank: int
    group: dist.ProcessGroup
    name: str
    """The group's name."""
    balanced: bool = False
    """Whether a rank's part is two chunks of 2 x `size`, one counted from each end, and not one of `size`."""


def balance(mesh: DeviceMesh, *, wanted: bool) -> None:
    """Let a rank's part be two chunks, the one as far from the beginning as the other is from the end, or one.

    Under a causal mask, early tokens attend to few others and late ones to many: so all ranks have the same work.
    """
    mesh.__dict__["_meshwright_axis"] = replace(_read_axis(mesh), balanced=wanted)


def chunks_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], int]:
    """The chunks of a divided dim that this rank holds, and the number of chunks in all."""
    axis = _axis_of(mesh)
    if axis.balanced:
        return (axis.rank, 2 * axis.size - 1 - axis.rank), 2 * axis.size
    return (axis.rank,), axis.size


def divides(size: int, mesh: DeviceMesh) -> bool:
    """Whether the ranks of an axis can have even parts of a dim."""
    axis = _axis_of(mesh)
    return size % (2 * axis.size if axis.balanced else axis.size) == 0


def _axis_of(mesh: DeviceMesh) -> _Axis:
    found: _Axis | None = mesh.__dict__.get("_meshwright_axis")
    if found is None:
        found = mesh.__dict__["_meshwright_axis"] = _read_axis(mesh)
    return found


def _read_axis(mesh: DeviceMesh) -> _Axis:
    group = mesh.get_group()
    return _Axis(mesh.size(), mesh.get_local_rank(), group, getattr(group, "group_name", ""))


def group_of(mesh: DeviceMesh) -> str:
    """The name of a mesh's group, for functional collectives."""
    return _axis_of(mesh).name


def place_in(mesh: DeviceMesh) -> tuple[int, int, str]:
    """This rank, the number of ranks, and the name of the group of a mesh, for functional collectives."""
    axis = _axis_of(mesh)
    return axis.rank, axis.size, axis.name


TAKE = direct_apply(Take)
COPY_IN, JOIN = direct_apply(PartialGradient), direct_apply(Join)
ADD_UP, ADD_UP_PART = direct_apply(AddUp), direct_apply(AddUpPart)
"""What programs have in place of `slice_in`, `copy_in`, `join`, `add_up` and `add_up_part`."""
copy_all_in, gather_rows = direct_apply(PartialGradients), direct_apply(GatherRows)
add_up_all, add_up_rows = direct_apply(AddUpAll), direct_apply(AddUpRows)
gather_parts, take_part = direct_apply(GatherParts), direct_apply(TakePart)
"""What rewritten programs have. They name their group, so they can be compiled."""
