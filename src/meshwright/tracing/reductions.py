"""The staging buffer of a sum over rows: PyTorch divides long columns among thread blocks, whose sums meet in memory.

Follows the launch configuration of PyTorch's reduction kernels (aten/src/ATen/native/cuda/Reduce.cuh) on a Hopper GPU.
The gradient of a bias of 4096 numbers over 6304 rows takes 132 MiB this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.dtypes import HALF

aten = torch.ops.aten

MULTIPROCESSORS = 132
THREADS = 2048
"""Threads that a multiprocessor holds."""
BLOCK, WARP = 512, 32
"""Most threads of a block, and those of a warp."""
FEWEST, MOST = 16, 256
"""Numbers that one thread should add up."""
_SINGLE = 4
_PAIR = 16
"""Bytes of a position with its value, or of a mean with its variance and count."""
_REDUCTIONS: dict[Any, tuple[int, int]] = {
    aten.sum.dim_IntList: (_SINGLE, 1),
    aten.mean.dim: (_SINGLE, 1),
    aten.amax.default: (1, 1),
    aten.amin.default: (1, 1),
    aten.linalg_vector_norm.default: (_SINGLE, 2),
    aten.var.correction: (_PAIR, 1),
    aten.var_mean.correction: (_PAIR, 1),
    aten.std.correction: (_PAIR, 1),
    aten.argmax.default: (_PAIR, 1),
    aten.argmin.default: (_PAIR, 1),
}
"""The fewest bytes in which each operator adds up, and where its dims are among the arguments."""

_SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.prod.default, aten.prod.dim_int, aten.nansum.default)
_RUNNING = (aten.cumsum.default, aten.cumprod.default)


def cast_before(func: Any, args: Any, found: Any) -> int:
    """Bytes of the copy in the result's dtype that is made before it is added up, such as that of a mask in int64.

    A sum in fp32 reads 16 bits as they are; a running sum does not.
    """
    if func not in _SUMS and func not in _RUNNING:
        return 0
    given, dtype = args[0], found.dtype
    as_it_is = func in _SUMS and given.dtype in HALF and dtype == torch.float32
    return 0 if given.dtype == dtype or as_it_is else given.numel() * dtype.itemsize


def reduction_staging(func: Any, args: Any) -> int:
    """Bytes of the staging buffer of an operator that reduces rows; 0 for other operators."""
    if func not in _REDUCTIONS:
        return 0
    size, place = _REDUCTIONS[func]
    dims = args[place] if len(args) > place else None
    if isinstance(dims, int):
        dims = [dims]
    return sum_staging(args[0], dims, size) if dims else 0


def sum_staging(tensor: Tensor, dims: Sequence[int], size: int = _SINGLE) -> int:
    """Bytes that a sum over `dims` allocates besides its result; 0 if the innermost dim is summed, which takes little.

    Threads of a warp take neighbouring columns, and the warps of a block share the rows. Only if many rows are left for
    each thread, several blocks share a column.
    """
    summed = {dim % tensor.dim() for dim in dims}
    sizes = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    inner = min(sizes, key=tensor.stride, default=None)
    if inner is None or inner in summed or not tensor.numel():
        return 0
    inputs = prod(tensor.shape[dim] for dim in summed)
    outputs = tensor.numel() // inputs
    vector = _vector(tensor, inner)
    columns, threads = outputs // vector, BLOCK // vector
    width = min(_power_of_two(columns, threads), WARP)
    height = min(_power_of_two(inputs, threads), threads // width)
    width = min(_power_of_two(columns, threads), threads // height)
    each = inputs
    if each < min(height * FEWEST, MOST):
        return 0
    each = ceil(each / height)
    grid, target = ceil(columns / width), MULTIPROCESSORS * (THREADS // (width * height))
    if each < MOST or grid > target:
        return 0
    blocks = max(min(ceil(target / grid), ceil(each / FEWEST)), ceil(each / MOST))
    return max(size, tensor.itemsize) * outputs * blocks * width * vector if blocks > 1 else 0


def _vector(tensor: Tensor, inner: int) -> int:
    """How many neighbouring columns a thread takes."""
    if tensor.stride(inner) != 1:
        return 1
    others = [tensor.stride(dim) for dim in range(tensor.dim()) if dim != inner and tensor.shape[dim] > 1]
    return next(size for size in (4, 2, 1) if not any(n % size for n in (tensor.shape[inner], *others)))


def _power_of_two(size: int, most: int) -> int:
    return 1 << (size.bit_length() - 1) if size < most else most
