"""Memory that a GPU takes to write at indices: gradients of rows that were looked up are added in the indices' order.

Follows PyTorch's kernels (aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu and Indexing.cu), and
agrees with what an H200 allocated (docs/data/operator_workspaces_gpu.json).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

UNSORTED = 3072
"""The most indices of an embedding whose gradient is summed without sorting."""
ROWS = 10
"""Rows that a thread sums; rows of one index that are more are summed in parts, which meet in memory."""
INDEX = 8


def embedding_gradient(args: Any) -> tuple[int, ...]:
    """Bytes held together: sorted indices, where each index's rows begin, and the partial sums in fp32."""
    gradient, indices, entries, _, by_frequency = args
    count = indices.numel()
    if count <= UNSORTED and not by_frequency:
        return ()
    segments = min(count, entries)
    parts = count // ROWS + segments
    sums = parts * gradient.shape[-1] * max(4, gradient.itemsize)
    return (*(INDEX * count,) * 3, *(INDEX * segments,) * 2, INDEX * parts, sums)


def index_gradient(args: Any) -> tuple[int, ...]:
    """Bytes held together when values are added at indices: the indices, their order, and what the sort takes."""
    indices, adds = args[1], args[3] if len(args) > 3 else False
    given = [index for index in indices if isinstance(index, Tensor)]
    if not adds or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return ()
    count = prod(torch.broadcast_shapes(*(index.shape for index in given)))
    return (*(INDEX * count,) * 4, 2 * INDEX * count)


def mask_places(args: Any) -> tuple[int, ...]:
    """Bytes of the places that values are taken from: one for each element of the mask."""
    return (INDEX * args[0].numel(),)
