"""Seconds of a kernel: the larger of what its arithmetic and its memory traffic need, and what the host needs to ask.

Where the numbers come from:

- A matrix product of 8192 cubed in bf16 reaches 796 of 989 TFLOP/s on an H200 (measured here), and in a training step
  on a GPU that is hot and also moves data less: `MATMUL`.
- FlashAttention-2 (Dao 2023, figures 4 to 7) reaches 0.4 to 0.7 of an A100, less with narrow heads and in backward, and
  0.35 of an H100, whose newer matrix instructions it does not use: `ATTENTION`.
- A device copy on an H200 reaches 4.3 of 4.8 TB/s (measured here); kernels that compute reach a little less: `STREAM`.
- A kernel takes about 3 microseconds even if it has nothing to do: `LEAST`.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.facts.costs import Kernel
from meshwright.facts.hardware import Hardware

MATMUL = 0.66
ATTENTION = {"Hopper": 0.33, "other": 0.46}
PLAIN = 0.82
"""Of the peak without matrix units, which is easier to reach: a GPT in fp32 takes 221 ms a step on an H200."""
STREAM = 0.72
LEAST = 3e-6
TILE = 128
"""A matrix product works on tiles of about so many rows and columns; a part of one costs as much as a whole."""
RAMP = 400
"""Products whose inner dim is short spend a part of their time on beginning and ending a tile."""
FUSED = 0.45
"""Of the time of kernels without products, what is left when torch.compile fuses neighbours."""
KEPT_COMPILED = 0.84
"""Of what a block keeps for backward, what a compiled one does: cheap results are computed again (H200, Llama shapes of
1.1B and 8.0B)."""
HOPPER = ("H100", "H200", "H800", "GH200")


def seconds(kernel: Kernel, samples: float, parts: int, hardware: Hardware, compiled: bool = False) -> float:
    """Device time of one kernel on so many samples, where tensor parallelism divides it into `parts`."""
    flops, moved = kernel.flops.at(samples) / parts, kernel.bytes.at(samples) / parts
    traffic = moved / (hardware.bandwidth * STREAM)
    if not flops:
        return (LEAST + traffic) * (FUSED if compiled else 1)
    return LEAST + max(traffic, flops / _speed(kernel, samples, parts, hardware))


def launches(kernels: tuple[Kernel, ...], compiled: bool) -> int:
    """How often the host asks: compiled neighbours without products are one kernel."""
    if not compiled:
        return len(kernels)
    return 2 * sum(kernel.kind != "other" for kernel in kernels) + 1


def _speed(kernel: Kernel, samples: float, parts: int, hardware: Hardware) -> float:
    peak = peak_flops(hardware, kernel.dtype)
    if kernel.dtype == "fp32":
        return peak * PLAIN
    if kernel.kind == "attention":
        return peak * ATTENTION["Hopper" if hardware.device.startswith(HOPPER) else "other"]
    if not kernel.shape:
        return peak * MATMUL
    _, rows, columns, inner = (size.at(samples) for size in kernel.shape)
    # A divided product is narrower in its wider direction.
    rows, columns = (rows / parts, columns) if rows > columns else (rows, columns / parts)
    return peak * MATMUL * _filled(rows) * _filled(columns) * inner / (inner + RAMP)


def _filled(size: float) -> float:
    """The share of whole tiles that is used."""
    size = max(1.0, size)
    return size / (-(-size // TILE) * TILE)


@lru_cache(maxsize=64)
def _peak(pairs: tuple[tuple[str, float], ...], dtype: str) -> float:
    known = dict(pairs)
    # A dtype that the device has no units for is computed in fp32.
    return known.get(dtype) or known.get("fp32") or next(iter(known.values()))


def peak_flops(hardware: Hardware, dtype: str) -> float:
    return _peak(tuple(hardware.flops.items()), dtype)
