"""Copies that a GPU's kernels make of operands that are not dense, and free when they are done.

Agrees with what an H200 allocated for single operators (docs/data/operator_workspaces_gpu.json).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.torch_private import operators

aten = torch.ops.aten
_DENSE: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
    operators.FUSED_RMS_NORM.default: (0,),
    operators.FUSED_RMS_NORM_BACKWARD.default: (0, 1),
    operators.SOFTMAX.default: (0,),
    operators.LOG_SOFTMAX.default: (0,),
    operators.LOG_SOFTMAX_BACKWARD.default: (0, 1),
    aten.embedding_dense_backward.default: (0,),
}
"""Operators that want some of their arguments dense, in the order of the dims."""
_POOLS = frozenset((aten.avg_pool2d.default, aten.max_pool2d_with_indices.default))
_FACTORS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
"""Matrix products, and where their factors are among the arguments."""


def dense_copies(func: Any, args: Any) -> tuple[int, ...]:
    """Bytes of the copies, which are held together while the operator runs."""
    if func in _DENSE:
        return tuple(args[place].nbytes for place in _DENSE[func] if not args[place].is_contiguous())
    if func in _FACTORS:
        return tuple(args[place].nbytes for place in _FACTORS[func] if not _is_matrix(args[place]))
    if func in _POOLS:
        x = args[0]
        kept = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
        return () if kept else (x.nbytes,)
    if func is operators.TO_REAL_FOURIER.default:
        return (args[0].nbytes,)  # the transform writes over its input
    if func is operators.SOFTMAX_BACKWARD.default:
        product = args[0].nbytes  # of the gradient and the result, laid out like the gradient
        return (product, *(product for tensor in args[:2] if not tensor.is_contiguous()))
    return ()


def _is_matrix(factor: Tensor) -> bool:
    """Whether cuBLAS reads the matrices in place: one dim is dense, and the other one's steps do not overlap."""
    (rows, columns), (down, across) = factor.shape[-2:], factor.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
