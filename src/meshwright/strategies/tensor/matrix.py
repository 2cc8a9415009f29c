"""Rules for products with divided matrices, and for their sums: linear layers, attention scores, embeddings."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.pieced_loss.head import Output, output_layer
from meshwright.pieced_loss.losses import ClassPart
from meshwright.strategies.collectives import add_up_part
from meshwright.strategies.float8_linear import float8_linear
from meshwright.strategies.recorder import noted
from meshwright.strategies.tensor.layout import (
    add_up,
    dim_of,
    divided,
    is_divided,
    local,
    part,
    pieces_of,
    shared,
    whole,
)
from meshwright.strategies.tensor.rules import Rule
from meshwright.torch_private.tensors import version_of

SEQUENCE = 1  # the dim of the sequence in (batch, sequence, width)


def linear(func: Rule, mesh: DeviceMesh, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The weight is divided over outputs (a column layer), over inputs (a row layer), or not at all."""
    multiply = func if func is _float8 else F.linear
    if is_divided(weight, mesh) and dim_of(weight) == 0:
        own_bias = _bias_part(bias, weight, mesh)
        if (output := output_layer(weight)) is not None and pieces_of(weight) == 1:
            return _put_off(output, shared_input(x, mesh), local(weight), own_bias, mesh)
        return divided(multiply(shared_input(x, mesh), local(weight), own_bias), -1, mesh, pieces_of(weight))
    if is_divided(weight, mesh) or (is_divided(x, mesh) and dim_of(x) == x.dim() - 1):
        if x.shape[-1] % mesh.size():
            return NotImplemented
        return _plus(add_up_in_stream(multiply(part(x, -1, mesh), part(weight, 1, mesh)), mesh), bias, mesh)
    if not is_divided(x, mesh):
        return NotImplemented
    own_bias = None if bias is None else shared(bias, mesh)
    return divided(multiply(local(x), shared(weight, mesh), own_bias), dim_of(x), mesh, pieces_of(x))


def linear_in_float8(mesh: DeviceMesh, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear layer that multiplies in float8. Each part is scaled by its own largest element."""
    result = linear(_float8, mesh, x, weight, bias)
    if result is not NotImplemented:
        return result
    return _float8(whole(x, mesh), whole(weight, mesh), None if bias is None else whole(bias, mesh))


_float8 = partial(noted, float8_linear)
"""`float8_linear` as one function of a recorded program."""


def _put_off(output: Output, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """An output layer's logits, divided over the classes, which the loss computes in pieces."""
    from meshwright.strategies.tensor.mode import tensor_region  # late, because it imports these rules

    part = ClassPart(group=mesh.get_group(), rank=mesh.get_local_rank(), ranks=mesh.size())
    region, join = partial(tensor_region, mesh), partial(divided, dim=-1, mesh=mesh)
    return output.logits(x, weight, bias, part=part, join=join, region=region)


@dataclass
class _Input:
    """The input of the latest column layer, and its shared copy."""

    source: weakref.ref[Tensor]
    state: tuple[Any, ...]
    copy: Tensor


_latest: ContextVar[_Input | None] = ContextVar("latest_input", default=None)


def shared_input(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`shared`, with one copy for consecutive reads (query, key, value), so that their gradients are summed once."""
    state = (mesh, torch.is_grad_enabled(), version_of(x) if not x.is_inference() else 0)
    latest = _latest.get()
    if latest is None or latest.source() is not x or latest.state != state:
        latest = _Input(weakref.ref(x), state, shared(x, mesh))
        _latest.set(latest)
    return latest.copy


def forget_input() -> None:
    """Forget the latest input at the end of a region, so that it does not keep an activation alive."""
    _latest.set(None)


def add_product(func: Rule, mesh: DeviceMesh, bias: Tensor, x: Tensor, weight: Tensor, **other: Any) -> Any:
    """`addmm`, as in a linear layer with a transposed weight."""
    if other or not is_divided(weight, mesh) or bias.dim() != 1 or x.dim() != 2:
        return NotImplemented
    if dim_of(weight) == 1:
        own_bias = _bias_part(bias, weight, mesh)
        assert own_bias is not None
        return divided(torch.addmm(own_bias, shared_input(x, mesh), local(weight)), 1, mesh, pieces_of(weight))
    return _plus(add_up(part(x, 1, mesh) @ local(weight), mesh), bias, mesh)


def _bias_part(bias: Tensor | None, weight: Tensor, mesh: DeviceMesh) -> Tensor | None:
    """The bias of this rank's outputs, in the weight's order."""
    if bias is None:
        return None
    if is_divided(bias, mesh) and is_divided(weight, mesh) and pieces_of(bias) == pieces_of(weight):
        return local(bias)
    pieces = whole(bias, mesh).chunk(pieces_of(weight))  # type: ignore[arg-type]
    return torch.cat([part(piece, 0, mesh) for piece in pieces])


def _plus(total: Tensor, bias: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """Add the bias once, after the shares are summed."""
    if bias is None:
        return total
    if is_divided(total, mesh):
        return divided(local(total) + shared(bias, mesh), dim_of(total), mesh)
    return total + bias


def matmul(func: Rule, mesh: DeviceMesh, a: Tensor, b: Tensor) -> Any:
    """Rows, columns and batches of a product are independent; shares along the contracted dim are summed."""
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    left, right = _place(a, mesh), _place(b, mesh)
    if max(left, right) > 2:
        return _matmul_in_batches(mesh, a, b, left if left > 2 else right)
    if left == 1 or right == 2:
        if a.shape[-1] % mesh.size():
            return NotImplemented
        return add_up_in_stream(part(a, -1, mesh) @ part(b, -2, mesh), mesh)
    if right == 1:  # checked first, so that a weight's columns stay divided
        return divided(shared_input(a, mesh) @ local(b), -1, mesh, pieces_of(b))  # type: ignore[arg-type]
    return divided(local(a) @ shared(b, mesh), -2, mesh)  # type: ignore[arg-type]


def _matmul_in_batches(mesh: DeviceMesh, a: Tensor, b: Tensor, place: int) -> Any:
    size = (a if _place(a, mesh) == place else b).shape[-place]

    def own(x: Tensor) -> Tensor:
        return part(x, -place, mesh) if x.dim() >= place and x.shape[-place] == size else shared(x, mesh)

    return divided(own(a) @ own(b), -place, mesh)


def _place(x: Tensor, mesh: DeviceMesh) -> int:
    """The divided dim counted from the right; 0 if the tensor is whole."""
    return x.dim() - dim_of(x) if is_divided(x, mesh) else 0


def embedding(
    func: Rule,
    mesh: DeviceMesh,
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Each rank looks up the rows that it holds, and adds zero for the others."""
    plain = is_divided(weight, mesh) and dim_of(weight) == 0 and not is_divided(index, mesh)
    if not plain or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    rows = local(weight)  # type: ignore[arg-type]
    first = mesh.get_local_rank() * len(rows)
    here = index - first
    elsewhere = (here < 0) | (here >= len(rows))
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0] - first  # its row gets no gradient
    own_padding = padding if 0 <= padding < len(rows) else None
    found = F.embedding(here.masked_fill(elsewhere, 0), rows, own_padding)
    return add_up_in_stream(found.masked_fill(elsewhere[..., None], 0), mesh)


def add_up_in_stream(share: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' shares in the layout of the residual stream."""
    if _along_sequence.get() and has_sequence(share, mesh):
        return divided(add_up_part(share, SEQUENCE, mesh), SEQUENCE, mesh)
    return add_up(share, mesh)


_along_sequence: ContextVar[bool] = ContextVar("along_sequence", default=False)


@contextmanager
def along_sequence(wanted: bool) -> Iterator[None]:
    """Region in which layers leave sums of shares divided along the sequence, if `wanted` and possible."""
    token = _along_sequence.set(wanted)
    try:
        yield
    finally:
        _along_sequence.reset(token)


def has_sequence(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether a tensor is (batch, sequence, width) with a sequence that the ranks can divide."""
    return x.dim() == 3 and x.shape[SEQUENCE] % mesh.size() == 0
