"""A quick checksum of samples: ranks compare what they read, and a resumed run what it passes over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy
import torch

from meshwright.describe.structure import leaves_of, tensors_of

VALUES = 64
"""So many values of a tensor are looked at: the checksum tells samples apart, and is not meant to find damage."""


def checksum(samples: Iterable[Any], before: int = 0) -> int:
    """The checksum of samples that follow those with the checksum `before`."""
    for sample in samples:
        before = crc32(_summary(sample), before)
    return before


def _summary(sample: Any) -> bytes:
    if isinstance(sample, int):
        return repr(sample).encode()
    return b";".join(_of_leaf(leaf) for leaf in leaves_of(sample))


def _of_leaf(leaf: Any) -> bytes:
    if isinstance(leaf, str | bytes | bytearray):
        data = leaf.encode(errors="replace") if isinstance(leaf, str) else bytes(leaf)
        return b"%d:%d" % (len(data), crc32(data))
    if leaf is None or isinstance(leaf, bool | int | float | complex | numpy.generic):
        return repr(leaf).encode()
    if isinstance(leaf, numpy.ndarray):
        return _of_array(leaf)
    tensors = tensors_of(leaf)
    return type(leaf).__name__.encode() + b",".join(_of_tensor(tensor) for tensor in tensors)


def _of_tensor(tensor: torch.Tensor) -> bytes:
    if tensor.is_nested or tensor.layout is not torch.strided:
        return repr(tuple(tensor.shape) if not tensor.is_nested else tensor.size(0)).encode()
    flat = tensor.detach().cpu().flatten()
    chosen = flat[:: max(1, len(flat) // VALUES)]
    return repr(tuple(tensor.shape)).encode() + repr(chosen.tolist()).encode()


def _of_array(array: numpy.ndarray) -> bytes:
    flat = array.reshape(-1)
    return repr(array.shape).encode() + repr(flat[:: max(1, len(flat) // VALUES)].tolist()).encode()
