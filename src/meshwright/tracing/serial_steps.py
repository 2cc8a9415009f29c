"""Kernels of which a thread goes through a dim by itself, and waits for memory at each place of it.

With few threads neither bytes nor elements limit such a kernel, but how often it waits. With enough threads to fill a
GPU, its bytes take longer. The weights are steps of `element_steps.py`, of which an H200 takes 4.1e11 a second.
"""

from __future__ import annotations

from typing import Any

import torch

WAIT = 1.56e5
"""Steps in the 0.38 microseconds of one place of a running sum: 2048 places of 15,360 columns take 0.78 ms."""
SCANS = {"cumsum": 1.0, "cumprod": 1.0, "cummax": 1.0, "cummin": 1.0, "logcumsumexp": 1.36}
"""Waits for one place. The last computes an exponential and a logarithm of the place before; 2048 take 1.06 ms."""
SOFTMAXES = {"_softmax": 2.7, "_log_softmax": 2.7, "_safe_softmax": 2.7}
SOFTMAXES |= {"_softmax_backward_data": 1.3, "_log_softmax_backward_data": 1.3}
"""Waits for one place: three passes through the dim, or two of operands that are read at the same time. 9,728 places of
3,072 columns take 10.1 and 4.9 ms."""
NARROW = 64
"""Columns up to which several threads share a softmax's dim."""
PLANE_WAIT = 0.66
"""Waits for one channel of one sample, which a thread interpolates after the one before: 0.25 microseconds, of 38
interpolations of 10 x 10 to 160 x 160 places."""
PLANES = frozenset(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d"))
SELECTED = 2.2
"""Steps for one byte that `topk` selects from: it reads all of them for each digit of a radix of 256."""
POOLED = 3.9
"""Steps for one element whose gradient a pooling's backward looks for in its windows, with the channels outermost."""


def serial_steps(name: str, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """The steps of an operator whose threads go through a dim alone; 0 for another one."""
    if name in SCANS:
        return _waiting(args, given[0], least=1) * SCANS[name]
    if name in SOFTMAXES:
        return _waiting(args, given[0], least=NARROW) * SOFTMAXES[name]
    if name in PLANES:
        return given[0].shape[:2].numel() * WAIT * PLANE_WAIT if given[0].is_contiguous() else 0.0
    if name == "topk":
        return given[0].numel() * given[0].itemsize * SELECTED
    if name == "max_pool2d_with_indices_backward" and made[0].is_contiguous():
        return made[0].numel() * POOLED
    return 0.0


def _waiting(args: Any, x: torch.Tensor, least: int) -> float:
    """The steps of one pass along the dim that the arguments name, if more than `least` columns are beside it."""
    dim = next((arg % max(1, x.dim()) for arg in args if type(arg) is int), None)
    if dim is None or x.shape[dim + 1 :].numel() <= least or not x.is_contiguous():
        return 0.0
    return x.shape[dim] * WAIT
