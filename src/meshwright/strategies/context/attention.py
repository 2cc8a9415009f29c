"""Rules for attention of this rank's tokens to all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.strategies.context.causal import attend_to_earlier
from meshwright.strategies.mesh_axis import chunks_of
from meshwright.strategies.tensor import matrix
from meshwright.strategies.tensor.attention import own_randomness
from meshwright.strategies.tensor.layout import dim_of, divided, is_divided, local, part, pieces_of, shared
from meshwright.strategies.tensor.rules import Rule

TOKENS = -2  # the dim of the tokens in (batch, heads, tokens, width)


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
    """Each rank gathers keys and values, and attends with its own queries. Backward sums their gradients' shares."""
    if not is_divided(query, mesh) or dim_of(query) != query.dim() + TOKENS:
        return NotImplemented
    if is_causal and (attn_mask is not None or key.shape[TOKENS] < query.shape[TOKENS]):
        return NotImplemented
    own, keys, values = local(query), shared(key, mesh), shared(value, mesh)
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    mask = _own_rows(attn_mask, query.shape[TOKENS], mesh)

    def attend() -> Tensor:
        if not is_causal:
            return F.scaled_dot_product_attention(own, keys, values, mask, **options)
        return _causal(own, keys, values, query.shape[TOKENS], mesh, options)

    if not dropout_p:
        return divided(attend(), TOKENS, mesh)
    with own_randomness(own, mesh):
        return divided(attend(), TOKENS, mesh)


def _own_rows(mask: Tensor | None, tokens: int, mesh: DeviceMesh) -> Tensor | None:
    """The rows of a mask for this rank's queries."""
    if mask is None:
        return None
    by_row = mask.dim() > 1 and mask.shape[TOKENS] == tokens
    return part(mask, TOKENS, mesh) if by_row else shared(mask, mesh)


def _causal(
    query: Tensor, keys: Tensor, values: Tensor, tokens: int, mesh: DeviceMesh, options: dict[str, Any]
) -> Tensor:
    """Attention of each chunk of tokens to all that come before its end."""
    places, count = chunks_of(mesh)
    ends = [(place + 1) * (tokens // count) for place in places]
    mixed = [
        attend_to_earlier(chunk, keys.narrow(TOKENS, 0, end), values.narrow(TOKENS, 0, end), **options)
        for chunk, end in zip(query.chunk(len(places), TOKENS), ends, strict=True)
    ]
    return torch.cat(mixed, TOKENS) if len(mixed) > 1 else mixed[0]


def matmul(func: Rule, mesh: DeviceMesh, a: Tensor, b: Tensor) -> Any:
    """Rows stay divided: those of attention's scores are this rank's queries."""
    has_rows = is_divided(a, mesh) and dim_of(a) == a.dim() - 2 and pieces_of(a) == 1
    by_batch = is_divided(b, mesh) and dim_of(b) < b.dim() - 2
    if not has_rows or by_batch or b.dim() < 2:
        return matrix.matmul(func, mesh, a, b)
    return divided(local(a) @ shared(b, mesh), -2, mesh)  # type: ignore[arg-type]


def add_product(func: Rule, mesh: DeviceMesh, bias: Tensor, x: Tensor, weight: Tensor, **other: Any) -> Any:
    """`addmm` of this rank's rows, as in a linear layer with a transposed weight."""
    if other or not is_divided(x, mesh) or dim_of(x) != 0 or is_divided(weight, mesh) or bias.dim() != 1:
        return NotImplemented
    return divided(torch.addmm(shared(bias, mesh), local(x), shared(weight, mesh)), 0, mesh)
