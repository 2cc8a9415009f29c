"""Apply `loss=pieced`: make a model's output layer return logits that the loss computes in pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.assemble.operator_dtypes import low
from meshwright.describe.dtypes import LOW
from meshwright.facts.model import HeadFacts
from meshwright.pieced_loss.head import HeadCalls, Output
from meshwright.pieced_loss.losses import compiled_gradient
from meshwright.recording.wrap_forward import wrap_forward


def piece_head(model: nn.Module, head: HeadFacts, dtype: torch.dtype, *, compiled: bool) -> None:
    """Put off the products of the output layer, as long as only the loss needs them."""
    output = Output(shape=(head.classes, head.width), gradient=compiled_gradient() if compiled else None)
    mode = HeadCalls(output, partial(_lowered, dtype) if dtype in LOW else _plain)

    def run(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    wrap_forward(model.get_submodule(head.module), run)


def _lowered(dtype: torch.dtype, product: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return low(product, dtype, args, kwargs)


def _plain(product: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return product(*args, **kwargs)
