"""Measure one device: matrix products by shape and dtype, memory bandwidth, host copies and kernel launches."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from math import prod
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear

from meshwright.describe.dtypes import DTYPES
from meshwright.facts.precision import FORMATS
from meshwright.runtime.profile_step import synchronize

BUDGET = 0.3
"""Seconds that one measurement takes at most, approximately."""
BATCHES = 5
"""Batches per measurement; their median is taken, so that one disturbance does not count."""
MOST = 2000
"""The most repetitions in a batch."""
SLOW = 0.1
"""After a call of this many seconds, nothing larger of its kind is tried: even a slow machine needs only a minute."""
GPU_SHAPES = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 1024, 4096))
CPU_SHAPES = ((256, 256, 256), (2048, 256, 512), (1024, 1024, 1024))
HALF_SHAPES = ((128, 128, 128), (256, 256, 256), (512, 512, 512))
"""For CPUs in half precision, which may take ten times as long."""
GPU_COPY, CPU_COPY = 2**28, 2**26
"""Bytes: more than caches hold."""
Agree = Callable[[float], float]


def time_of(
    action: Callable[[], Any], device: torch.device, *, budget: float = BUDGET, agree: Agree = lambda seconds: seconds
) -> float:
    """Seconds of one call, the median over batches. Ranks that act together `agree` on the time of a first call."""
    action()  # the first one plans, allocates and connects
    once = agree(_batch(action, device, 1))
    if once > budget:
        # One lost packet, or a busy core, makes a short call look long: TCP sends again after 200 ms.
        once = min(once, agree(_batch(action, device, 1)))
    if once > budget:
        return once
    count = max(1, min(MOST, int(budget / BATCHES / once)))
    batches = max(1, min(BATCHES, int(budget / once)))
    return median(_batch(action, device, count) / count for _ in range(batches))


def measure_matmuls(device: torch.device) -> list[dict[str, Any]]:
    """One row per dtype and shape, in operations per second."""
    rows = []
    for name in DTYPES:
        if FORMATS[name].factors:  # its products depend on scales, and the catalogue knows their rate
            continue
        for shape in _shapes(name, device):
            rows.append(_matmul(name, shape, device))
            if 2 * prod(shape) / rows[-1]["flops"] > SLOW:
                break
    return rows


def measure_memory(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy within the device."""
    size = GPU_COPY if device.type == "cuda" else CPU_COPY
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_of(lambda: target.copy_(source), device)


def measure_launch(device: torch.device) -> float:
    """Seconds of one operator on almost no data: the time that the host needs to launch it."""
    value = torch.zeros(8, device=device)
    return time_of(lambda: value.add_(1.0), device)


def measure_host_copies(device: torch.device) -> dict[str, float]:
    """Bytes per second from and to pinned host memory, and the seconds of the smallest copy."""
    host = torch.empty(GPU_COPY, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(GPU_COPY, dtype=torch.uint8, device=device)
    return {
        "to_device": GPU_COPY / time_of(lambda: there.copy_(host, non_blocking=True), device),
        "to_host": GPU_COPY / time_of(lambda: host.copy_(there, non_blocking=True), device),
        "latency": time_of(lambda: there[:8].copy_(host[:8]), device),
    }


def _batch(action: Callable[[], Any], device: torch.device, count: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        action()
    synchronize(device)
    return time.perf_counter() - start


def _matmul(name: str, shape: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    (m, n, k), dtype = shape, DTYPES[name]
    left = torch.randn(m, k, device=device).to(dtype)
    right = torch.randn(n, k, device=device).to(dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from a CPU without units for the dtype: the number shows it
        seconds = time_of(lambda: linear(left, right), device)
    return {"dtype": name, "shape": list(shape), "flops": 2 * m * n * k / seconds}


def _shapes(dtype: str, device: torch.device) -> tuple[tuple[int, int, int], ...]:
    if device.type == "cuda":
        # A V100 or T4 has no bf16 units; torch would emulate it.
        return GPU_SHAPES if dtype != "bf16" or torch.cuda.get_device_capability(device) >= (8, 0) else ()
    return HALF_SHAPES if FORMATS[dtype].is_low else CPU_SHAPES
