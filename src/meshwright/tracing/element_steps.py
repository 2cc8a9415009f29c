"""Elements that a kernel without matrix products computes one at a time, where that and not memory limits its speed.

PyTorch's elementwise kernels read several elements at once if all operands have the same dense layout. With a strided,
broadcast or transposed operand they compute one address per element, and norms and softmaxes do more work per element
than their bytes show. A step is one element of a kernel with a broadcast operand; the weights below are the seconds per
element relative to that, from kernels that were timed alone on an H200 (4.1e11 steps a second).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

TRANSPOSED = 2.7
"""One operand varies fastest along another dim than the result: 1.5e11 elements a second."""
CAST = 1.1
"""Two bytes read and four written, or operands of several dtypes: 3.6e11."""
BATCH_NORMS = {"native_batch_norm": 2.9, "native_batch_norm_backward": 5.3}
"""For one element of a channel, if every processor has a channel: 1.07e9 and 0.59e9 elements a second each."""
PROCESSORS, RESIDENT = 132, 2
"""Streaming multiprocessors, and how many channels' blocks share one without slowing each other down."""
ROWS = dict.fromkeys(("native_layer_norm", "native_group_norm"), 0.66)
ROWS |= {"_softmax": 1.1, "_log_softmax": 1.1, "_safe_softmax": 2.5}
ROWS_BACKWARD = {"native_layer_norm_backward": (0.9, 2.6), "native_group_norm_backward": (0.9, 2.6)}
"""Without and with gradients of the affine weights, which are sums over all rows."""
SOFTMAX_BACKWARD = 0.55
"""For one byte of an element's dtype."""
INDEXED = {"gather": 1.3, "scatter_add": 2.3, "scatter_add_": 2.3, "index_put": 1.6, "index_put_": 1.6}
SORTING, UNSORTED = 5.7e7, 3072
"""Steps in the 0.14 ms that an embedding's gradient takes to sort its indices, and the most that it does not sort."""
GROUPED = {"usual": (0.43, 0.7), "last": (0.093, 0.117), "last, fp32": (0.43, 1.4)}
"""For one product of a depthwise convolution, forward and backward, by layout: 9.6e11 and 5.8e11 a second in the usual
one; with channels last 4.4e12 and 3.5e12 in 16 bits, and 3e11 in fp32's backward."""
MOST_PRODUCTS = 4096
"""Products for one result of one group up to which groups count as narrow: one channel, and a kernel of 64 x 64."""
COPIES = frozenset(("clone", "copy_", "_to_copy", "contiguous"))


def grouped_steps(shape: tuple[int, ...], given: list[torch.Tensor], *, backward: bool) -> float:
    """The steps of a convolution in groups of a few channels, which no matrix unit computes; 0 for another one."""
    if not shape or shape[0] == 1 or shape[2] * shape[3] > MOST_PRODUCTS:
        return 0.0
    channels_last = any(_fastest(leaf) == 1 for leaf in given[: 1 + backward] if leaf.dim() == 4)
    layout = ("last, fp32" if given[0].itemsize > 2 else "last") if channels_last else "usual"
    passes = 2 if backward else 1
    return prod(shape) * passes * GROUPED[layout][backward]


def element_steps(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """The steps of an operator with these arguments and results; 0 if only its bytes count."""
    name, operands = func.overloadpacket.__name__, [leaf for leaf in (*given, *made) if leaf.dim()]
    if not operands or not made:
        return 0.0
    size = max(leaf.numel() for leaf in operands)
    if name in BATCH_NORMS:
        channels = given[0].shape[1] if given[0].dim() > 1 else 1
        return BATCH_NORMS[name] * given[0].numel() / channels * max(PROCESSORS, channels / RESIDENT)
    if name in ROWS:
        return size * (ROWS[name] + TRANSPOSED * _copied(given, size))
    if name in ROWS_BACKWARD:
        return size * (ROWS_BACKWARD[name][len(made) > 1] + TRANSPOSED * _copied(given, size))
    if name == "_softmax_backward_data":
        return size * SOFTMAX_BACKWARD * given[0].itemsize
    if name == "embedding_dense_backward":
        return SORTING if given[-1].numel() > UNSORTED else 0.0
    if name in INDEXED:
        return size * INDEXED[name]
    if torch.Tag.pointwise in func.tags or name in COPIES:
        return size * _weight(given, made[0], size)
    return size * TRANSPOSED if made[0].numel() < size and _is_strided(operands, size) else 0.0


def _weight(given: list[torch.Tensor], result: torch.Tensor, size: int) -> float:
    """Steps per element of an elementwise kernel."""
    whole = [leaf for leaf in given if leaf.numel() == size and leaf.dim()]
    fastest = _fastest(result)
    alike = [leaf for leaf in whole if leaf.shape == result.shape]
    # A stride of 0 repeats one element, which is read from a cache.
    if fastest is not None and any(leaf.stride(fastest) and _fastest(leaf) != fastest for leaf in alike):
        return TRANSPOSED
    layouts = {tuple(leaf.squeeze().stride()) for leaf in (*whole, result)}
    if len(layouts) > 1 or any(leaf.dim() and leaf.numel() < size for leaf in given):
        return 1.0
    numbers = [leaf for leaf in whole if leaf.is_floating_point()]
    widens = any(leaf.itemsize < result.itemsize for leaf in numbers)
    return CAST if widens or len({leaf.dtype for leaf in numbers}) > 1 else 0.0


def _copied(given: list[torch.Tensor], size: int) -> int:
    """How many inputs are transposed, and so copied before the kernel runs."""
    return sum(leaf.numel() == size and not leaf.is_contiguous() for leaf in given)


def _is_strided(operands: list[torch.Tensor], size: int) -> bool:
    """Whether the largest operand, which is reduced, varies fastest along another dim than its last one."""
    largest = next(leaf for leaf in operands if leaf.numel() == size)
    return _fastest(largest) not in (None, largest.dim() - 1)


def _fastest(tensor: torch.Tensor) -> int | None:
    """The dim with the smallest stride; None if no dim has two elements at different addresses."""
    moving = [(stride, -dim) for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))]
    moving = [pair for pair in moving if pair[0] > 0 and tensor.shape[-pair[1]] > 1]
    return -min(moving)[1] if moving else None
