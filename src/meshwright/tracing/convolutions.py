"""Memory that cuDNN takes for a convolution besides its results, on a device with tensor cores.

Tensor cores want the channels innermost, and a multiple of 8 of them (4 in TF32). cuDNN copies tensors that are laid
out otherwise into a workspace: its two operands, and its result before it is copied back. So a 16-bit convolution of
contiguous tensors takes one more copy of its input, weight and output. Measured on an H200 with cuDNN 9.19, with its
heuristics and without its benchmark mode: benchmarks/workspaces_gpu.py, docs/tracing.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.dtypes import HALF
from meshwright.tracing.allocator import round_up
from meshwright.tracing.reductions import MULTIPROCESSORS, sum_staging

Held = tuple[int, ...]
"""Sizes that are allocated at the same time."""
TILE = (256, 128)
"""Rows and columns of a weight gradient that a multiprocessor computes at a time."""
ROWS_EACH = 10_000
"""Rows that a multiprocessor should add up before several share a tile."""
DIRECT_TAPS = range(9, 17)
"""Kernels of 3 x 3 to 4 x 4: with few input channels, a kernel without tensor cores is chosen."""
MANY_CHANNELS = 128
"""Channels from which a product of single pixels copies tensors that tensor cores cannot load."""
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Layer:
    """A convolution's tensors and numbers."""

    x: Tensor
    weight: Tensor
    y: Tensor
    """Its output, or the gradient of it."""
    stride: tuple[int, ...]
    transposed: bool
    groups: int

    @property
    def taps(self) -> int:
        return prod(self.weight.shape[2:])

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product of the tensors as they are."""
        return self.taps == 1 and max(self.stride) == 1 and self.groups == 1

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.x.shape[1] > 1

    @property
    def given_channels(self) -> int:
        """Channels of what the convolution reads; a transposed one is the gradient of one that reads its output."""
        return self.y.shape[1] if self.transposed else self.x.shape[1]

    @property
    def channels_last(self) -> bool:
        return any(_is_channels_last(tensor) for tensor in (self.x, self.weight))

    def copies(self) -> tuple[int, int, int]:
        """Bytes of copies of the input, the weight and the output with channels innermost; 0 for those not made."""
        multiple = 8 if self.x.dtype in HALF else 4
        own = multiple if self.groups == 1 else 1
        sizes = _padded(self.x, 1, own), _padded(self.weight, own, own), _padded(self.y, 1, own)
        if self.channels_last:
            odd = [bool(tensor.shape[1] % multiple) for tensor in (self.x, self.y)]
            made = odd[0], any(odd), odd[1]
        else:
            made = True, self.taps > 1, True
        return tuple(size * one for size, one in zip(sizes, made, strict=True))  # type: ignore[return-value]


def forward_workspaces(layer: Layer) -> Held:
    """What a convolution's forward pass allocates besides its output."""
    return *_contiguous_copies(layer, layer.x), *_forward(layer)


def forward_copies(layer: Layer) -> int:
    """Bytes that the forward pass copies to another layout, or back."""
    return sum(forward_workspaces(layer)) + _unaligned_copies(layer)


def _forward(layer: Layer) -> Held:
    if layer.is_product or layer.is_depthwise or not _uses_tensor_cores(layer):
        return ()
    x, weight, y = layer.copies()
    if layer.x.dtype == torch.float32 and not layer.channels_last and _writes_in_place(layer):
        y = 0
    return (x + weight + y,)


def backward_workspaces(layer: Layer, mask: Any) -> list[Held]:
    """What a convolution's backward pass allocates besides its results: for input, weight and bias, one by one."""
    gradient, copies = layer.y, _contiguous_copies(layer, layer.x, layer.y)
    held = []
    if mask[0]:
        held.append((*copies, *_input_gradient(layer)))
    if mask[1]:
        held.append((*copies, *_weight_gradient(layer)))
    if mask[2]:
        held.append((sum_staging(gradient, [dim for dim in range(gradient.dim()) if dim != 1]),))
    return held


def backward_copies(layer: Layer, mask: Any) -> int:
    """Bytes that the backward pass copies to another layout, or back."""
    if layer.is_product:
        return _unaligned_copies(layer) * sum(map(bool, mask[:2]))
    if layer.is_depthwise or not _allows_tensor_cores(layer):
        return 0
    own = sum(layer.copies()) + sum(_contiguous_copies(layer, layer.x, layer.y))
    return own * sum(map(bool, mask[:2]))


def _unaligned_copies(layer: Layer) -> int:
    """Bytes that a product of single pixels copies, for its time: none if tensor cores can load a channel's pixels.

    They load 16 bytes at a time. Where planes of pixels are no multiple of that, such as 7 x 7 and 14 x 14 in 16 bits,
    cuDNN copies both tensors, or chooses a kernel with narrower loads that takes about as long. Convolutions of 256 to
    1536 channels on an H200 do so, those of 64 do not.
    """
    multiple = 8 if layer.x.dtype in HALF else 4
    is_aligned = layer.channels_last or prod(layer.x.shape[2:]) % multiple == 0
    if not layer.is_product or is_aligned or min(layer.weight.shape[:2]) < MANY_CHANNELS:
        return 0
    return layer.x.numel() * layer.x.itemsize + layer.y.numel() * layer.y.itemsize


def _input_gradient(layer: Layer) -> Held:
    if layer.is_product or layer.is_depthwise or not _allows_tensor_cores(layer):
        return ()
    return (sum(layer.copies()),)


def _weight_gradient(layer: Layer) -> Held:
    samples, elements = layer.x.shape[0], layer.weight.numel()
    if layer.is_depthwise:
        # Eight fp32 gradients for each sample; contiguous tensors use PyTorch's kernel, which needs nothing.
        return (8 * samples * elements * 4,) if layer.channels_last and layer.x.dtype in HALF else ()
    x, _, y = copies = layer.copies()
    if layer.is_product and layer.x.dim() < 5:
        # One fp32 gradient for each sample, which are summed, unless copying takes less.
        each = samples * elements * 4
        return (min(each, x + y) if not layer.channels_last else each,)
    if layer.x.dtype == torch.float32 and layer.given_channels < 4 and layer.taps <= DIRECT_TAPS[-1]:
        return ()
    return (sum(copies) + _partial_sums(layer),)


def _partial_sums(layer: Layer) -> int:
    """fp32 gradients whose sum is a weight's gradient: where it has few tiles, multiprocessors share the rows."""
    outer = layer.weight.shape[0]
    tiles = ceil(outer / TILE[0]) * ceil(layer.weight.numel() / outer / TILE[1])
    shares = min(MULTIPROCESSORS // tiles, layer.y.numel() // layer.y.shape[1] // ROWS_EACH)
    return shares * layer.weight.numel() * 4 if shares > 1 else 0


def _allows_tensor_cores(layer: Layer) -> bool:
    """Whether the dtype does, and what it reads in fp32 has enough channels."""
    if layer.x.dtype in HALF:
        return True
    return layer.x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32 and layer.given_channels >= 4


def _uses_tensor_cores(layer: Layer) -> bool:
    """Whether cuDNN computes forward on tensor cores: not if most of the padded channels would be zeros."""
    channels, dims = layer.x.shape[1], layer.x.dim() - 2
    few = (dims == 3 and channels < 8) or (dims == 2 and channels < 16 and layer.taps in DIRECT_TAPS)
    return _allows_tensor_cores(layer) and not (few and layer.x.dtype in HALF and not layer.channels_last)


def _writes_in_place(layer: Layer) -> bool:
    """Whether the kernel writes an fp32 output as it is laid out: for few channels, of one and two dims."""
    inner, outer, dims = layer.x.shape[1] * layer.taps, layer.y.shape[1], layer.x.dim() - 2
    if layer.transposed or not 4 <= outer <= 128:
        return False
    return dims == 1 or (dims == 2 and inner <= 64 * 9)


def _contiguous_copies(layer: Layer, *tensors: Tensor) -> Held:
    """PyTorch's own copies before it calls cuDNN: all tensors must have one of two layouts."""
    copied = [*tensors, layer.weight] if layer.channels_last else tensors
    return tuple(tensor.numel() * tensor.itemsize for tensor in copied if not _has_layout(tensor, layer.channels_last))


def _has_layout(tensor: Tensor, channels_last: bool) -> bool:
    if channels_last:
        return tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])
    return tensor.is_contiguous()


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether PyTorch would keep the channels innermost; it never does so in one dimension."""
    layout = _FORMATS.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def _padded(tensor: Tensor, first: int, second: int) -> int:
    """Bytes of a tensor whose first two dims are rounded up to multiples."""
    rows, columns = tensor.shape[:2]
    return round_up(rows, first) * round_up(columns, second) * prod(tensor.shape[2:]) * tensor.itemsize
