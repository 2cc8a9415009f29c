"""A Triton kernel that rounds a matrix to float8 and writes it in both orders, reading it once.

Imported only where Triton and a GPU are. PyTorch's own copy of one-byte elements into the other order takes ten times
as long as their bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64, 128


@triton.jit  # type: ignore[untyped-decorator]
def _round_in_both_orders(  # type: ignore[no-untyped-def]
    source,
    scale,
    plain,
    turned,
    rows,
    columns,
    with_plain: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)
    column = (tl.program_id(1) * block_columns + tl.arange(0, block_columns)).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    values = tl.load(source + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    low = values.to(turned.dtype.element_ty)
    if with_plain:
        tl.store(plain + place, low, mask=inside)
    tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(low), mask=tl.trans(inside))


def round_matrix(matrix: Tensor, scale: Tensor, dtype: torch.dtype, *, with_plain: bool) -> list[Tensor]:
    """The matrix times its scale in `dtype`, in its own order if that is wanted, and turned."""
    rows, columns = matrix.shape
    turned = torch.empty(columns, rows, dtype=dtype, device=matrix.device)
    plain = torch.empty_like(matrix, dtype=dtype) if with_plain else turned
    grid: Any = (triton.cdiv(rows, BLOCK[0]), triton.cdiv(columns, BLOCK[1]))
    _round_in_both_orders[grid](matrix, scale, plain, turned, rows, columns, with_plain, *BLOCK, num_warps=8)
    return [plain, turned] if with_plain else [turned]
