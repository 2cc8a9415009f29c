"""Rules for attention over this rank's heads, and for dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.recorder import noted
from meshwright.strategies.tensor.layout import dim_of, divided, is_divided, local, part, shared, whole
from meshwright.strategies.tensor.rules import Rule
from meshwright.torch_private.dtensor import local_tensor
from meshwright.torch_private.fake_tensors import FakeTensor

HEADS = -3  # the dim of the heads in (batch, heads, sequence, width)


def attention(
    func: Rule,
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Each rank computes its heads. Keys and values may have fewer heads, or be whole if their heads do not divide."""
    heads, ranks = query.shape[HEADS] if query.dim() == 4 else 0, mesh.size()
    if heads == 0 or heads % ranks or not _over_heads(mesh, query, key, value):
        return NotImplemented
    own_key, own_value = (_own_heads(x, heads, mesh) for x in (key, value))
    own_query, own_mask = part(query, HEADS, mesh), _own_mask(attn_mask, heads, mesh)
    grouped = enable_gqa and own_key.shape[HEADS] != heads // ranks
    given = own_query, own_key, own_value, own_mask, dropout_p, is_causal, scale, grouped
    mixed = noted(_attend_own, mesh, *given) if dropout_p else _attend(*given)
    return divided(mixed, HEADS, mesh)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )


def _attend_own(mesh: DeviceMesh, query: Tensor, *others: Any) -> Tensor:
    with own_randomness(query, mesh):
        return _attend(query, *others)


def _over_heads(mesh: DeviceMesh, *tensors: Tensor) -> bool:
    """Whether a tensor is divided over its heads. Along any other dim, attention would mix the ranks' parts."""
    return any(is_divided(x, mesh) and dim_of(x) == x.dim() + HEADS for x in tensors)


def _own_heads(x: Tensor, heads: int, mesh: DeviceMesh) -> Tensor:
    """The keys or values of this rank's query heads."""
    if x.shape[HEADS] % mesh.size() == 0:
        return part(x, HEADS, mesh)
    x = whole(x, mesh)
    return part(x.repeat_interleave(heads // x.shape[HEADS], HEADS), HEADS, mesh)


def _own_mask(mask: Tensor | None, heads: int, mesh: DeviceMesh) -> Tensor | None:
    if mask is None:
        return None
    by_head = mask.dim() >= -HEADS and mask.shape[HEADS] == heads
    return part(mask, HEADS, mesh) if by_head else shared(mask, mesh)


def dropout(
    func: Rule, mesh: DeviceMesh, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **other: Any
) -> Any:
    """Every rank draws a different mask for its part."""
    if other or inplace or not is_divided(x, mesh):
        return NotImplemented
    if not training or p == 0.0:
        return x
    return divided(noted(_drop_own, local(x), p, mesh), dim_of(x), mesh)


def _drop_own(x: Tensor, p: float, mesh: DeviceMesh) -> Tensor:
    with own_randomness(x, mesh):
        return F.dropout(x, p, training=True)


@contextmanager
def own_randomness(x: Tensor, mesh: DeviceMesh) -> Iterator[None]:
    """Region in which the ranks of the axis draw different random numbers. Afterwards they draw the same again.

    The seed comes from the CPU's generator, which is the same on all ranks, so a recomputed block draws the same again.
    """
    if isinstance(local_tensor(x) if is_dtensor(x) else x, FakeTensor):
        yield  # fake tensors have no values
        return
    seed = int(torch.randint(2**31, ()))
    own_seed = seed * mesh.size() + mesh.get_local_rank()
    on_cpu = x.device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [x.device], device_type="cuda" if on_cpu else x.device.type):
        torch.default_generator.manual_seed(own_seed)
        if not on_cpu:
            torch.get_device_module(x.device).manual_seed(own_seed)
        yield
