"""One product for several linear layers that read the same tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.torch_private.autograd import direct_apply, wanted_by_backward
from meshwright.torch_private.modes import without_torch_function
from meshwright.torch_private.tensors import storage_id


class Product(torch.autograd.Function):
    """`linear(x, cat(weights), cat(biases))`. The joined weights are not kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.biased = bool(biases)
        return F.linear(x, joined(weights), joined(biases) if biases else None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with without_torch_function():  # in backward modes are active, for blocks that are recomputed
            return _gradients(ctx, gradient)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_input, *of_parameters = wanted_by_backward(ctx)
    sizes = [len(weight) for weight in weights]
    rows = gradient.flatten(0, -2)
    found: list[Any] = [(rows @ joined(weights)).view(x.shape) if of_input else None, None]
    if any(of_parameters):
        found += (rows.t() @ x.flatten(0, -2)).split_with_sizes(sizes)
        found += rows.sum(0).split_with_sizes(sizes) if ctx.biased else []
    return *found, *[None] * (2 + len(of_parameters) - len(found))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts below each other: a view, if they lie so in memory, as the copies of a block's parameters do."""
    if not are_adjacent(parts):
        return torch.cat(tuple(parts))
    first, rows = parts[0], sum([part.shape[0] for part in parts])
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def are_adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether tensors lie one after another in the same memory."""
    memory, place = storage_id(parts[0].untyped_storage()), parts[0].storage_offset()
    for part in parts:
        if part.storage_offset() != place or not part.is_contiguous() or storage_id(part.untyped_storage()) != memory:
            return False
        place += part.numel()
    return True


product = direct_apply(Product)
