"""Seconds of a kernel: the larger of what its arithmetic and its memory traffic need, and what the host needs to ask.

Where the numbers come from, unless the device's own were measured (`Hardware.reach`):

- A matrix product of 8192 cubed in bf16 reaches 796 of 989 TFLOP/s on an H200 (measured here), and in a training step
  on nodes of eight that are hot and also move data less: `MATMUL`, which the published steps of H100 and A100 show.
- FlashAttention-2 (Dao 2023, figures 4 to 7) reaches 0.4 to 0.7 of an A100, less with narrow heads and in backward, and
  0.35 of an H100, whose newer matrix instructions it does not use: `ATTENTION`. Heads of 64 reach 0.32 of an H200 where
  those of 128 reach 0.44 (kernels of docs/data/plan_gpu.json): `NARROW`.
- A device copy on an H200 reaches 4.3 of 4.8 TB/s (measured here); kernels that compute reach less: `STREAM`.
- A kernel takes about 3 microseconds even if it has nothing to do: `LEAST`.
- Without matrix units, products of a BERT in fp32 reach 51 of 67 TFLOP/s on an H200 and its attention 35: `PLAIN`.
  Convolutions in fp32 are computed in tf32 unless PyTorch is told otherwise, and those of a ResNet reach 150 of 494.
- cuBLAS takes older kernels for 16-bit products whose sides are no multiple of 8: of an H200's 989 TFLOP/s they reach
  120 with an odd vocabulary and 253 with an even one, a sixth and a third of what others do: `ODD`, `EVEN`.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.facts.costs import Kernel
from meshwright.facts.hardware import Hardware
from meshwright.facts.precision import FORMATS, FULL

MATMUL = 0.63
ATTENTION = {"Hopper": 0.33, "other": 0.46}
NARROW = 0.75
WIDE_HEAD = 128
PLAIN = {"attention": 0.52, "other": 0.77}
CONVOLUTION = 0.3
STREAM = 0.72
LEAST = 3e-6
TILE = 128
"""A matrix product works on tiles of about so many rows and columns; a part of one costs as much as a whole."""
RAMP = 220
"""Products whose inner dim is short spend a part of their time on beginning and ending a tile."""
ODD, EVEN = 0.16, 0.34
FUSED = 0.45
"""Of the time of kernels without products, what is left when torch.compile fuses neighbours."""
KEPT_COMPILED = 0.84
"""Of what a block keeps for backward, what one that is compiled by itself does: cheap results are computed again (H200,
Llama shapes of 1.1B and 8.0B). Where a whole model is compiled, PyTorch keeps what backward uses far from where it was
made, and that is nearly all (docs/data/plan_gpu.json: 0.97 to 1.01 of the peak)."""
HOPPER = ("H100", "H200", "H800", "GH200")


def seconds(kernel: Kernel, samples: float, parts: int, hardware: Hardware, compiled: bool = False) -> float:
    """Device time of one kernel on so many samples, where tensor parallelism divides it into `parts`."""
    flops, moved = kernel.flops.at(samples) / parts, kernel.bytes.at(samples) / parts
    traffic = moving(moved, hardware)
    if not flops:
        return (LEAST + traffic) * (FUSED if compiled else 1)
    return LEAST + max(traffic, flops / _speed(kernel, samples, parts, hardware))


def moving(moved: float, hardware: Hardware) -> float:
    """Seconds of reading and writing so many bytes by kernels that do little else."""
    return moved / (hardware.bandwidth * hardware.reach.get("stream", STREAM))


def launches(kernels: tuple[Kernel, ...], compiled: bool) -> int:
    """How often the host asks: compiled neighbours without products are one kernel."""
    if not compiled:
        return len(kernels)
    return 2 * sum(kernel.kind != "other" for kernel in kernels) + 1


def _speed(kernel: Kernel, samples: float, parts: int, hardware: Hardware) -> float:
    if not FORMATS[kernel.dtype].is_low:
        return _plain_speed(kernel, hardware)
    peak = peak_flops(hardware, kernel.dtype)
    if kernel.kind == "attention":
        usual = ATTENTION["Hopper" if hardware.device.startswith(HOPPER) else "other"]
        narrow = NARROW if kernel.shape and kernel.shape[-1].fixed < WIDE_HEAD else 1.0
        return peak * hardware.reach.get("attention", usual) * narrow
    reached = peak * hardware.reach.get("matmul", MATMUL)
    if not kernel.shape:
        return reached
    _, rows, columns, inner = (size.at(samples) for size in kernel.shape)
    # A divided product is narrower in its wider direction.
    rows, columns = (rows / parts, columns) if rows > columns else (rows, columns / parts)
    return reached * _filled(rows) * _filled(columns) * inner / (inner + RAMP) * _aligned(kernel)


def _plain_speed(kernel: Kernel, hardware: Hardware) -> float:
    """Of fp32, which matrix units take for convolutions only."""
    if kernel.kind == "convolution" and "tf32" in hardware.flops:
        return hardware.flops["tf32"] * CONVOLUTION
    return peak_flops(hardware, FULL.word) * PLAIN.get(kernel.kind, PLAIN["other"])


def _aligned(kernel: Kernel) -> float:
    """What is left of the speed where a side of a weight is no multiple of 8; what grows with samples is outermost."""
    sides = [int(size.fixed) for size in kernel.shape[1:] if not size.each]
    if any(side % 2 for side in sides):
        return ODD
    return EVEN if any(side % 8 for side in sides) else 1.0


def _filled(size: float) -> float:
    """The share of whole tiles that is used."""
    size = max(1.0, size)
    return size / (-(-size // TILE) * TILE)


@lru_cache(maxsize=64)
def _peak(pairs: tuple[tuple[str, float], ...], dtype: str) -> float:
    known = dict(pairs)
    # A dtype that the device has no units for is computed in fp32.
    return known.get(dtype) or known.get(FULL.word) or next(iter(known.values()))


def peak_flops(hardware: Hardware, dtype: str) -> float:
    return _peak(tuple(hardware.flops.items()), dtype)
