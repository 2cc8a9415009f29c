"""Run a traced attention as this device does: the trace takes flash attention where a Hopper device takes cuDNN's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.torch_private.operators import (
    CUDNN_ATTENTION,
    CUDNN_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    schema_of,
)

FORWARD = tuple(one.default for one in (FLASH_ATTENTION, CUDNN_ATTENTION, EFFICIENT_ATTENTION))
BACKWARD = tuple(
    one.default for one in (FLASH_ATTENTION_BACKWARD, CUDNN_ATTENTION_BACKWARD, EFFICIENT_ATTENTION_BACKWARD)
)


def attention_run(operator: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """A function that runs `scaled_dot_product_attention`, or its backward, in place of the operator.

    None for other operators, and for what that function does not compute: causal attention to keys of other tokens.
    """
    if operator not in (*FORWARD, *BACKWARD):
        return None
    names = [argument.name for argument in schema_of(operator).arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, key, value = (given[name].detach().requires_grad_() for name in ("query", "key", "value"))
    if given.get("is_causal") and query.shape[-2] != key.shape[-2]:
        return None
    inputs, bias = [query, key, value], given.get("attn_bias")
    if bias is not None and given.get("grad_input_mask", [False])[-1]:
        bias = bias.detach().requires_grad_()
        inputs.append(bias)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=given.get("dropout_p", 0.0),
            is_causal=given.get("is_causal", False),
            scale=given.get("scale"),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    if operator in FORWARD:
        return forward
    output, gradient = forward(), given.get("grad_out", given.get("grad_out_"))
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)
