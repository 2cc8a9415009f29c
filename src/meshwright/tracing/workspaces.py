"""Memory that an operator's library takes while it runs, which no tensor of the model shows."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.describe.as_on_cuda import stands_in
from meshwright.describe.recurrent import recurrent_workspaces
from meshwright.torch_private import operators
from meshwright.tracing.composed import temporaries
from meshwright.tracing.convolutions import (
    Held,
    Layer,
    backward_copies,
    backward_workspaces,
    forward_copies,
    forward_workspaces,
)
from meshwright.tracing.dense_copies import dense_copies
from meshwright.tracing.indexing import embedding_gradient, index_gradient, mask_places
from meshwright.tracing.reductions import cast_before, reduction_staging

aten = torch.ops.aten
_LOOK_UPS = {
    aten.embedding_dense_backward.default: embedding_gradient,
    operators.PUT_AT_INDICES.default: index_gradient,
    aten.index_put.default: index_gradient,
    aten.index_put_.default: index_gradient,
    aten.masked_scatter.default: mask_places,
    aten.masked_scatter_.default: mask_places,
}


def operator_workspaces(func: Any, args: Any, found: Any, *, sums: bool = True) -> list[Held]:
    """What an operator allocates and frees besides its results on a GPU: sizes held together, one after another.

    Without `sums`, only what grows in proportion to the samples: a sum over rows takes no more from some number on.
    """
    if not stands_in():
        return []
    if func is aten.convolution.default:
        return [forward_workspaces(_forward_layer(args, found))]
    if func is aten.convolution_backward.default:
        mask = args[-1]
        return backward_workspaces(_backward_layer(args), [*mask[:2], mask[2] and sums])
    if func in _LOOK_UPS:
        return [(*dense_copies(func, args), *_LOOK_UPS[func](args))]
    staged = reduction_staging(func, args) if sums else 0
    cast = cast_before(func, args, found)
    composed = temporaries(func, args, sums=sums)
    sequence = [(cast, staged), dense_copies(func, args), *composed, *recurrent_workspaces(func, args)]
    return [held for held in sequence if any(held)]


def layout_copies(func: Any, args: Any, found: Any) -> int:
    """Bytes that an operator copies to another layout or dtype besides those of its kernel.

    cuDNN copies tensors to another layout and back; PyTorch adds the bias to the result afterwards, and sums the
    gradient of the result for that of the bias, which takes as long as copying 2 bytes for each element.
    """
    if not stands_in():
        return 0
    if func is aten.convolution.default:
        added = found.numel() * found.itemsize if args[2] is not None else 0
        return forward_copies(_forward_layer(args, found)) + added
    if func is aten.convolution_backward.default:
        mask = args[-1]
        return backward_copies(_backward_layer(args), mask) + (2 * args[0].numel() if mask[2] else 0)
    return cast_before(func, args, found)


def _forward_layer(args: Any, found: Any) -> Layer:
    x, weight, _, stride, _, _, transposed, _, groups = args
    return Layer(x, weight, found, tuple(stride), transposed, groups)


def _backward_layer(args: Any) -> Layer:
    gradient, x, weight, _, stride, _, _, transposed, _, groups, _ = args
    return Layer(x, weight, gradient, tuple(stride), transposed, groups)
