"""How much memory a compiler gives to a value: rows that begin at round addresses, and matrices that are padded.

Sizes are Inductor's defaults. Whether a product is padded it tries out on the GPU; here that is a rule, drawn from what
it chose on an H200: products of a vocabulary of 30522 with a width of 1024 were padded, but not where only the result's
rows were odd; with 50257 and 1600 those, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.describe.dtypes import HALF
from meshwright.tracing.allocator import round_up

ROW, ALIGNMENT = 1024, 128
"""Rows of more elements than this begin at a multiple of so many bytes."""
PAD, WIDE, INTENSITY = 8, 1280, 100
"""What the dims of matrices are padded to, if the product is so wide, or computes so much for an element it moves."""


@dataclass(frozen=True)
class Buffer:
    """Memory of one value."""

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
    """A product of two matrices, one of which at least is copied into a larger one first."""

    copies: tuple[Buffer | None, Buffer | None]
    """None for a matrix that is read as it is."""
    result: Buffer


def buffer_of(value: Tensor, *, aligned: bool) -> Buffer:
    """What a value takes; `aligned` if the compiler is free to choose its strides."""
    shape, strides = tuple(value.shape), tuple(value.stride())
    if aligned and value.is_contiguous():
        strides = aligned_strides(shape, value.dtype)
    return Buffer(shape, strides, value.dtype)


def aligned_strides(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Strides of a dense tensor whose long rows begin at round addresses."""
    multiple, stride = ALIGNMENT // dtype.itemsize, 1
    strides: list[int] = []
    for size in reversed(shape):
        stride = round_up(stride, multiple) if stride > ROW else stride
        strides.append(stride)
        stride *= size
    return tuple(strides[::-1])


def find_padding(left: Tensor, right: Tensor) -> Padding | None:
    """How a product of matrices is padded: tensor cores want rows whose length `PAD` divides."""
    (m, k), n, dtype = left.shape, right.shape[1], left.dtype
    if dtype not in HALF or m * n * k < INTENSITY * (m * k + k * n + m * n):
        return None
    if not (k % PAD or n % PAD) and not (m % PAD and n >= WIDE):
        return None
    m, k, n = (round_up(size, PAD) for size in (m, k, n))
    result = Buffer((m, n), aligned_strides((m, n), dtype), dtype)
    return Padding((_padded(left, (m, k)), _padded(right, (k, n))), result)


def _padded(matrix: Tensor, shape: tuple[int, int]) -> Buffer | None:
    """A larger copy that lies by rows or by columns, as the original does."""
    if tuple(matrix.shape) == shape:
        return None
    by_columns = matrix.stride(0) == 1
    strides = aligned_strides(shape[::-1] if by_columns else shape, matrix.dtype)
    return Buffer(shape, strides[::-1] if by_columns else strides, matrix.dtype)
