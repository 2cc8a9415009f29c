"""Causal attention of the last tokens of a sequence to the whole of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.describe.as_on_cuda import flash, stands_in, takes_flash
from meshwright.strategies.tensor.layout import dim_of, divided, is_divided, local


def attend_to_earlier(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The queries are those of the last tokens; each attends to the tokens up to its own.

    `options` are those of `scaled_dot_product_attention`, whose `is_causal` takes queries for those of the first
    tokens. The flash kernel takes them for those of the last ones.
    """
    rows, columns = query.shape[-2], key.shape[-2]
    if rows == columns:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    if isinstance(query, DTensor):
        mesh, dim = query.device_mesh, dim_of(query)
        if all(is_divided(x, mesh) and dim_of(x) == dim for x in (key, value)):  # each rank has its own heads
            parts = (local(x) for x in (query, key, value))  # type: ignore[arg-type]
            return divided(attend_to_earlier(*parts, **options), dim, mesh)
    elif (query.is_cuda or stands_in()) and takes_flash(query, key, value, None, is_causal=False):
        return flash(query, key, value, options["dropout_p"], is_causal=True, scale=options["scale"])
    mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    return F.scaled_dot_product_attention(query, key, value, mask, **options)
