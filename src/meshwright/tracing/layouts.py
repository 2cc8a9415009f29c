"""How much memory a compiler gives to a value: rows are aligned, and matrices may be padded.

Sizes are Inductor's defaults. Inductor decides by experiments on the GPU whether to pad a matrix product. Here that is
a rule, derived from its choices on an H200: products with a vocabulary of 30522 and a width of 1024 were padded, except
where only the result's rows were odd; with 50257 and 1600 those were padded too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.describe.dtypes import HALF
from meshwright.tracing.allocator import round_up

ROW, ALIGNMENT = 1024, 128
"""Rows of more than ROW elements begin at a multiple of ALIGNMENT bytes."""
PAD, WIDE, INTENSITY = 8, 1280, 100
"""Dims are padded to a multiple of PAD if the product is WIDE, or does INTENSITY operations per element it moves."""


@dataclass(frozen=True)
class Buffer:
    """The memory of one value."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        if not all(self.shape):
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Padding:
    """A matrix product with at least one matrix copied into a larger buffer first."""

    copies: tuple[Buffer | None, Buffer | None]
    """None for a matrix that is not copied."""
    result: Buffer


def buffer_of(value: Tensor, *, aligned: bool) -> Buffer:
    """The buffer of a value; `aligned` if the compiler may choose its strides."""
    shape, strides = tuple(value.shape), tuple(value.stride())
    if aligned and value.is_contiguous():
        strides = aligned_strides(shape, value.dtype)
    return Buffer(shape, strides, value.dtype)


def aligned_strides(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Strides of a dense tensor with aligned rows."""
    multiple, stride = ALIGNMENT // dtype.itemsize, 1
    strides: list[int] = []
    for size in reversed(shape):
        stride = round_up(stride, multiple) if stride > ROW else stride
        strides.append(stride)
        stride *= size
    return tuple(strides[::-1])


def find_padding(left: Tensor, right: Tensor) -> Padding | None:
    """How a matrix product is padded: tensor cores need rows whose length is a multiple of `PAD`."""
    (m, k), n, dtype = left.shape, right.shape[1], left.dtype
    if dtype not in HALF or m * n * k < INTENSITY * (m * k + k * n + m * n):
        return None
    if not (k % PAD or n % PAD) and not (m % PAD and n >= WIDE):
        return None
    m, k, n = (round_up(size, PAD) for size in (m, k, n))
    result = Buffer((m, n), aligned_strides((m, n), dtype), dtype)
    return Padding((_padded(left, (m, k)), _padded(right, (k, n))), result)


def _padded(matrix: Tensor, shape: tuple[int, int]) -> Buffer | None:
    """A larger copy in row or column order, like the original."""
    if tuple(matrix.shape) == shape:
        return None
    by_columns = matrix.stride(0) == 1
    strides = aligned_strides(shape[::-1] if by_columns else shape, matrix.dtype)
    return Buffer(shape, strides[::-1] if by_columns else strides, matrix.dtype)
