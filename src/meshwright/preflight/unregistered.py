"""Find trainable tensors that a model keeps where PyTorch does not look for parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwright.torch_private.modules import REGISTERED

DEPTH = 4
"""How deep containers inside one another are searched."""


def unregistered_tensors(model: nn.Module) -> dict[str, list[str]]:
    """Their names, by the attribute that holds them directly or in lists and dicts."""
    known = {id(one) for one in (*model.parameters(), *model.buffers(), *model.modules())}
    found: dict[str, list[str]] = {}
    for owner, module in model.named_modules():
        for attribute, value in vars(module).items():
            name = f"{owner}.{attribute}" if owner else attribute
            held = [] if attribute in REGISTERED else [*_trainable(name, value, known, DEPTH)]
            found |= {name: held} if held else {}
    return found


def _trainable(name: str, value: Any, known: set[int], depth: int) -> Iterator[str]:
    if id(value) in known or not depth:
        return
    if isinstance(value, nn.Module):
        inside = value.named_parameters()
        yield from (f"{name}.{inner}" for inner, one in inside if one.requires_grad and id(one) not in known)
    elif isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf:
            yield name
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _trainable(f"{name}[{key!r}]", inner, known, depth - 1)
