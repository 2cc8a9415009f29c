"""Communication over a mesh axis that autograd can go through.

Outside of a divided operator every rank of the axis holds the same activations and the same gradients. Going in, an
activation is copied (and its gradient, of which each rank has a share, is summed) or a slice of it is taken; coming
out, parts are gathered or shares are summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 gave it a new name, and torch 2.11 has the old one only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def copy_in(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same on every rank; its gradient is the sum of what the ranks give."""
    return _CopyIn.apply(x, mesh)  # type: ignore[no-any-return]


def slice_in(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part along a dim; the gradient is gathered from the ranks' parts."""
    return _SliceIn.apply(x, dim, mesh)  # type: ignore[no-any-return]


def gather(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """The ranks' parts one after another along a dim; the gradient is this rank's part of the whole's."""
    return _Gather.apply(x, dim, mesh)  # type: ignore[no-any-return]


def add_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares; each share's gradient is the sum's."""
    return _AddUp.apply(x, mesh)  # type: ignore[no-any-return]


# Autograd calls no `backward` for an input that needs no gradient, so nothing is sent for it.
class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.mesh), None


class _SliceIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _own(x, dim, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _joined(gradient, ctx.dim, ctx.mesh), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _joined(x, dim, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own(gradient, ctx.dim, ctx.mesh), None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _summed(x, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _own(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def _joined(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    gathered = x.new_empty(mesh.size(), *x.shape)
    _all_gather(gathered.view(-1), x.contiguous().view(-1), group=mesh.get_group())
    return torch.cat(gathered.unbind(), dim)


def _summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # autograd's own tensors are not to be changed
    dist.all_reduce(x, group=mesh.get_group())
    return x
