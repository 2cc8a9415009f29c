"""A matrix rounded to float8, in its own order and turned: float8 products want both factors along the summed dim.

On a GPU it is an operator of its own: with Triton, one kernel reads the matrix once and writes both orders. A compiler
does not look inside, so it keeps what the operator returns; traced on tensors without values it does the same.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

_HAS_KERNEL = find_spec("triton") is not None


def rounded(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor times its scale, in `dtype`. The product is exact in bf16, because the scale is a power of two."""
    return (tensor * scale.to(tensor.dtype)).to(dtype)


def rounded_and_turned(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rounded`, and its transpose, both with contiguous rows."""
    if matrix.is_cuda:
        return _round_both(matrix.contiguous(), scale, dtype)  # type: ignore[no-any-return]
    plain = rounded(matrix, scale, dtype)
    return plain, plain.t().contiguous()


def turned(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The transpose of `rounded`, with contiguous rows."""
    if matrix.is_cuda:
        return _round_turned(matrix.contiguous(), scale, dtype)  # type: ignore[no-any-return]
    return rounded(matrix, scale, dtype).t().contiguous()


@torch.library.custom_op("meshwright::round_both", mutates_args=())
def _round_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not _HAS_KERNEL:
        plain = rounded(matrix, scale, dtype)
        return plain, plain.t().contiguous()
    from meshwright.strategies.float8_kernel import round_matrix

    plain, other = round_matrix(matrix, scale, dtype, with_plain=True)
    return plain, other


@_round_both.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(matrix, dtype=dtype), matrix.new_empty(*reversed(matrix.shape), dtype=dtype)


@torch.library.custom_op("meshwright::round_turned", mutates_args=())
def _round_turned(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not _HAS_KERNEL:
        return rounded(matrix, scale, dtype).t().contiguous()
    from meshwright.strategies.float8_kernel import round_matrix

    (other,) = round_matrix(matrix, scale, dtype, with_plain=False)
    return other


@_round_turned.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.new_empty(*reversed(matrix.shape), dtype=dtype)
