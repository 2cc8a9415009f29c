"""Causal attention of the last tokens of a sequence to the whole of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_to_earlier(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """The queries are those of the last tokens; each attends to the tokens up to its own."""
    rows, columns = query.shape[-2], key.shape[-2]
    if rows == columns:
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa
        )
    mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, False, scale=scale, enable_gqa=enable_gqa
    )
