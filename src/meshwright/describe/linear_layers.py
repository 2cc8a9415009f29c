"""Recognise linear layers, and tell how their weights are laid out."""

from __future__ import annotations

from typing import Any

from torch import nn


def output_dim(module: nn.Module) -> int:
    """The dim of a linear layer's weight that runs over its outputs: 1 for Hugging Face's Conv1D, else 0."""
    return 0 if isinstance(module, nn.Linear | nn.Embedding) else 1


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or Hugging Face's Conv1D, recognised by its shape and its `nf`."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return False
    return isinstance(module, nn.Linear) or getattr(module, "nf", None) == weight.shape[1]


def output_width(module: Any) -> int:
    """The number of outputs of a linear layer."""
    return int(module.weight.shape[output_dim(module)])
