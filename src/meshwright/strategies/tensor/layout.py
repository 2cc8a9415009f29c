"""The layout of tensors in a model that is divided over a tensor axis.

Note: DTensor only carries. A tensor is either plain, and then it is whole and the same on every rank of the axis; or it
is a `DTensor` that carries this rank's even part along one dim. Replicated and partial DTensors are never used, so no
rule in `rules.py` has to handle them.

A part's gradient is the same part of the whole gradient. A whole tensor has a whole gradient: if ranks compute shares
of it, backward sums them. Parameters of an axis whose gradients the data strategy sums are the exception: their
gradients stay shares (`strategies/shares.py`).

The part of one axis may be divided over another one: a DTensor in a DTensor. A collective then runs on the innermost
part (`innermost`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.errors import Refused
from meshwright.strategies import collectives
from meshwright.strategies.collectives import copy_in, join, slice_in
from meshwright.strategies.mesh_axis import divides
from meshwright.strategies.parts import own_part
from meshwright.strategies.recorder import active, aliased
from meshwright.strategies.shares import has_shares
from meshwright.strategies.tensor.memory import MADE_FROM, WHOLE, check_unchanged
from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.dtensor import local_tensor, make_dtensor, spec_of
from meshwright.torch_private.modes import without_torch_function

PIECES, _SKIPPED = "_meshwright_pieces", "_meshwright_skipped"


def is_divided(x: object, mesh: DeviceMesh) -> TypeGuard[DTensor]:
    """Whether a tensor is divided on this axis. DTensors of a data strategy are on other meshes."""
    if not isinstance(x, DTensor):
        return False
    own = x.device_mesh
    return (own is mesh or own == mesh) and type(x.placements[0]) is Shard


def dim_of(x: DTensor) -> int:
    placement = x.placements[0]
    assert isinstance(placement, Shard)
    return placement.dim % x.dim()


def pieces_of(x: DTensor) -> int:
    """The number of separately divided pieces of a fused tensor; 1 for other tensors."""
    return int(x.__dict__.get(PIECES, 1))


def divided(local: torch.Tensor, dim: int, mesh: DeviceMesh, pieces: int = 1) -> DTensor:
    """A tensor that is divided along a dim, from this rank's part."""
    carrier: DTensor = aliased(_carry, local, dim % local.dim(), pieces, mesh)
    if pieces > 1:
        carrier.__dict__[PIECES] = pieces
    return carrier


class _Carry(torch.autograd.Function):
    """Puts a part into a DTensor. A model's own autograd function may return a whole gradient for it."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, dim: int, pieces: int, mesh: DeviceMesh) -> DTensor:
        ctx.dim, ctx.pieces, ctx.mesh = dim, pieces, mesh
        with without_torch_function():
            return make_dtensor(local.detach(), _spec_of_whole(local, dim, mesh))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if is_divided(gradient, ctx.mesh) and dim_of(gradient) == ctx.dim:
            return opened(gradient), None, None, None
        pieces = whole(gradient, ctx.mesh).chunk(ctx.pieces, ctx.dim)
        own = [part(piece, ctx.dim, ctx.mesh) for piece in pieces]
        return torch.cat(own, ctx.dim) if ctx.pieces > 1 else own[0], None, None, None


def _spec_of_whole(local: torch.Tensor, dim: int, mesh: DeviceMesh) -> Any:
    """The whole tensor's shape and layout. Each is made once: DTensor takes longer for it than for an operator."""
    specs = mesh.__dict__.setdefault("_meshwright_specs", {})
    key = local.shape, local.stride(), local.dtype, dim
    found = specs.get(key)
    if found is None:
        like = local.detach()
        if isinstance(like, DTensor):  # the part of another axis, which `from_local` refuses
            like = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        found = specs[key] = spec_of(DTensor.from_local(like, mesh, [Shard(dim)], run_check=False))
    return found


class _Open(torch.autograd.Function):
    """Takes the part out of a DTensor, as `DTensor.to_local` does for gradients of any layout."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.dim, ctx.mesh, own = dim_of(x), x.device_mesh, local_tensor(x)
        with without_torch_function():
            return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        return _carry(gradient, ctx.dim, 1, ctx.mesh)  # type: ignore[no-any-return]


def opened(x: DTensor) -> torch.Tensor:
    """`local` of a divided tensor that nobody has changed."""
    return _open(x) if torch.is_grad_enabled() else local_tensor(x)


def divided_result(own: torch.Tensor, dim: int, mesh: DeviceMesh, pieces: int) -> DTensor:
    """`divided`, for a block that finds out later which tensor it was made from (`part_of`)."""
    carrier: DTensor = _carry(own, dim, pieces, mesh)
    if pieces > 1:
        carrier.__dict__[PIECES] = pieces
    if own.requires_grad:
        carrier.__dict__[MADE_FROM] = own
    return carrier


def part_of(x: DTensor) -> torch.Tensor:
    """`opened`, or the very tensor that it was made from, so that gradients need not be carried in between."""
    own: torch.Tensor | None = x.__dict__.get(MADE_FROM)
    if own is None or not torch.is_grad_enabled():
        return opened(x)
    x.__dict__[_SKIPPED] = True
    return own


def keep_gradients(x: DTensor) -> None:
    """Let gradients pass through the carrier, because somebody asks for them there."""
    x.__dict__.pop(MADE_FROM, None)
    if x.__dict__.get(_SKIPPED):
        raise Refused(
            f"The model asks for the gradient of an activation of shape {tuple(x.shape)} (register_hook, retain_grad) "
            "after a block has read it. Ask for it before, or set MESHWRIGHT_PROGRAMS=0."
        )


def local(x: DTensor) -> torch.Tensor:
    """This rank's part of a divided tensor; fused tensors keep the order of their pieces."""
    check_unchanged(x)
    return aliased(opened, x)  # type: ignore[no-any-return]


def part(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a tensor along a dim."""
    dim %= x.dim()
    if is_divided(x, mesh) and dim_of(x) == dim and pieces_of(x) == 1:
        return local(x)
    if not divides(x.shape[dim], mesh):
        raise ValueError(f"{mesh.size()} ranks cannot divide dim {dim} of a tensor of shape {tuple(x.shape)}.")
    if has_shares(x, mesh):
        return own_part(x, dim, 1, mesh)
    return innermost(whole(x, mesh), dim, lambda own: slice_in(own, dim, mesh))


def whole(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return _joined(x, mesh, shares=False) if is_divided(x, mesh) else x


def whole_of_fused(x: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """`whole`, gathered once for all functions that read the same activation."""
    if x.grad_fn is None:  # a parameter, whose values change
        return whole(x, mesh)
    check_unchanged(x)
    state = (active.get(), torch.is_grad_enabled())
    known = x.__dict__.get(WHOLE)
    if known is None or known[0] != state:
        known = x.__dict__[WHOLE] = (state, whole(x, mesh))
    return known[1]


def shared(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A whole tensor for a computation in which each rank computes a share of its gradient."""
    if is_divided(x, mesh) and pieces_of(x) == 1:
        return _joined(x, mesh, shares=True)
    if has_shares(x, mesh):
        return x
    x = whole(x, mesh)
    return innermost(x, None, lambda own: copy_in(own, mesh)) if x.requires_grad and torch.is_grad_enabled() else x


def add_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares, on every rank."""
    return innermost(x, None, lambda own: collectives.add_up(own, mesh))


def _joined(x: DTensor, mesh: DeviceMesh, *, shares: bool) -> torch.Tensor:
    dim, pieces = dim_of(x), pieces_of(x)
    return innermost(local(x), dim, lambda own: join(own, dim, pieces, shares, mesh))


def innermost(x: torch.Tensor, dim: int | None, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run a collective along a dim on a tensor that another axis may have divided."""
    if not isinstance(x, DTensor):
        return run(x)
    mesh = x.device_mesh
    if dim is not None and dim_of(x) == dim:
        return run(whole(x, mesh))
    return divided(innermost(local(x), dim, run), dim_of(x), mesh, pieces_of(x))


_carry, _open = direct_apply(_Carry), direct_apply(_Open)
