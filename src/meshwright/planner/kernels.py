"""Device seconds of a kernel: a roofline over its arithmetic and its memory traffic, plus a fixed minimum.

Sources of the efficiencies, which apply unless the device's own were measured (`Hardware.reach`):

- A bf16 matmul of 8192 cubed reaches 796 of 989 TFLOP/s on an H200 (measured here), and less in a training step on
  hot nodes of eight that also move data: `MATMUL`, from published steps of H100 and A100.
- FlashAttention-2 (Dao 2023, figures 4 to 7) reaches 0.4 to 0.7 of an A100, less with narrow heads and in backward, and
  0.35 of an H100, whose newer matrix instructions it does not use: `ATTENTION`. Heads of 64 reach 0.32 of an H200,
  heads of 128 reach 0.44 (kernels of docs/data/plan_gpu.json): `NARROW`.
- Three compiled decoders on an H200, whose masks are read by cuDNN's attention, reach 0.53 to 0.55 of the rate of those
  without (docs/data/unseen_gpu.json and unseen_second_gpu.json, kernels of OLMo 2, Pythia and Nemotron): `MASKED`.
- A device copy on an H200 reaches 4.3 of 4.8 TB/s (measured here); kernels that compute reach less: `STREAM`. Those
  that read and write long rows in order reach more than others: compiled ones of a Llama, a Nemotron and a EuroBERT
  0.70, 0.71 and 0.81 of an H200, a fused Adam 0.71, casts of all parameters 0.64 to 0.76 (`reach["in order"]`).
- Even an empty kernel takes about 3 microseconds: `LEAST`.
- In fp32, without matrix units, matmuls of a BERT reach 51 of 67 TFLOP/s on an H200 and its attention 35: `PLAIN`.
  PyTorch computes fp32 convolutions in tf32 by default.
- A convolution is a matmul whose rows are pixels, and whose inner dim are the weights of one output channel. 300 of
  them on an H200 (facts/kernel_tables) are forecast to a fifth so, if the copies to the layout that tensor cores want
  and back count as well; by their FLOPs alone they were half off. Gradients in tf32 reach less: `TF32_BACKWARD`.
- cuBLAS uses older kernels for 16-bit matmuls whose sides are not multiples of 8, which load or store 2 or 4 bytes at a
  time: `UNALIGNED`. Their main loop is slow, and their start and end are not. From products of an H200 with odd sides
  and inner dims of 64 to 50265, and with even ones of 64 and 768 (docs/data, `longest` of unseen_*kernels*.json).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.facts.compiled_blocks import FUSED as FUSED_NAME
from meshwright.facts.costs import Kernel, Size
from meshwright.facts.hardware import Hardware
from meshwright.facts.precision import FORMATS, FULL

MATMUL = 0.63
ATTENTION = {"Hopper": 0.33, "other": 0.46}
NARROW = 0.75
MASKED = 0.54
WIDE_HEAD = 128
SHORT, USUAL_KEYS = 400, 1024
"""Attention over few keys spends its time on starting, on masks and on the softmax: over 200 to 8192 keys a query,
kernels of an H200 reach `keys / (keys + SHORT)` of their best speed. The shares above are of 2048 causal tokens."""
PROCESSORS, QUERY_TILE, TAIL, USUAL_WORK = 132, 128, 0.6, 7.8
"""Blocks of causal attention take from nothing to the time of the longest, and the last ones run beside processors that
have no more to do: `TAIL` of that time, on as many processors as an H100 or H200 has. The shares above are of so many
longest blocks for each of them."""
PLAIN = {"attention": 0.52, "other": 0.77}
TF32_BACKWARD = 0.7
COPIES = 3
"""Kernels that copy a convolution's tensors: two operands and a result."""
STREAM = 0.72
LEAST = 3e-6
STEP = 11.7
"""Bytes that the data sheet's memory would move while a GPU computes one of `Kernel.steps`: an H200 computes 4.1e11 of
them a second (`tracing/element_steps.py`)."""
TILE = 128
"""Rows and columns of a matmul's tile; a partly filled tile costs as much as a full one."""
RAMP = 220
"""Matmuls with a short inner dim spend part of their time on starting and finishing a tile."""
SEQUENTIAL = 1 / 3
"""Share of a recurrent layer's products that run time step by time step: those of the state, not of the input or of
the weights' gradients, which take all steps at once."""
TIME_STEP = 12e-6
"""A time step of a recurrent layer waits for the one before, and is two kernels: a product of few tiles, which leaves
most processors idle, and the gates. LSTMs of 1024 and 1536 on an H200 take 8 and 6 microseconds for them."""
UNALIGNED = {"odd result": (0.121, 330), "odd": (0.175, 350), "even": (0.40, 660)}
"""Share of the usual rate, and the `RAMP`, of products with a side that is not a multiple of 8. The first is of results
with odd rows: 2 bytes are stored at a time."""
STARTING = 1 / 3
"""Share of `RAMP` for starting a tile; the rest is for storing it, which takes less for a partly filled one."""
PAD = 8
FUSED = 0.45
"""Share of the time of elementwise kernels that remains when torch.compile fuses neighbours."""
KEPT_COMPILED = 0.84
"""Share of what a block keeps for backward that a separately compiled block keeps: cheap results are recomputed (H200,
Llama shapes of 1.1B and 8.0B), where that is not measured for the model itself (tracing/compiled_blocks.py)."""
HOPPER = ("H100", "H200", "H800", "GH200")


def seconds(kernel: Kernel, samples: float, parts: int, hardware: Hardware, compiled: bool = False) -> float:
    """Device time of one kernel for a micro-batch of `samples`, divided into `parts` by tensor parallelism."""
    flops, moved = kernel.flops.at(samples) / parts, kernel.bytes.at(samples) / parts
    traffic = moving_in_order(moved, hardware) if kernel.name == FUSED_NAME else moving(moved, hardware)
    if compiled and not flops:
        return (LEAST + traffic) * FUSED
    stepping = _stepping(kernel, samples, parts, hardware)
    if stepping or not flops:
        return LEAST + max(traffic, stepping)
    computing = flops / _speed(kernel, samples, parts, hardware)
    if kernel.kind == "recurrent":
        waiting = kernel.shape[0].at(samples) * TIME_STEP
        return max(waiting, traffic, SEQUENTIAL * computing) + (1 - SEQUENTIAL) * computing
    return LEAST + _copying(kernel, samples, parts, hardware) + max(traffic, computing)


def moving(moved: float, hardware: Hardware) -> float:
    """Seconds that a memory-bound kernel takes to read and write `moved` bytes."""
    return moved / (hardware.bandwidth * hardware.reach.get("stream", STREAM))


def moving_in_order(moved: float, hardware: Hardware) -> float:
    """The same for a kernel that reads and writes long rows, as those of optimizers, casts and compilers do."""
    usual = hardware.reach.get("stream", STREAM)
    return moved / (hardware.bandwidth * hardware.reach.get("in order", usual))


def padded(kernel: Kernel) -> Kernel:
    """A product as a compiler runs it: weights with an odd side, such as that of a vocabulary, are padded."""
    if kernel.kind != "matmul" or not kernel.shape:
        return kernel
    sides = (Size(-(-size.fixed // PAD) * PAD) if not size.each else size for size in kernel.shape[1:])
    return replace(kernel, shape=(kernel.shape[0], *sides))


def _stepping(kernel: Kernel, samples: float, parts: int, hardware: Hardware) -> float:
    """Seconds of computing elements one at a time, on a GPU whose kernels were measured.

    `STREAM` is a mean over the kernels of published steps, and so has the slow ones in it.
    """
    if hardware.device == "cpu" or "stream" not in hardware.reach:
        return 0.0
    return kernel.steps.at(samples) / parts * STEP / hardware.bandwidth


def _copying(kernel: Kernel, samples: float, parts: int, hardware: Hardware) -> float:
    """Seconds of copying to another layout and back: all bytes are read and written."""
    copied = kernel.copied.at(samples) / parts
    return COPIES * LEAST + moving(2 * copied, hardware) if copied else 0.0


def launches(kernels: tuple[Kernel, ...], compiled: bool) -> int:
    """Kernels that the host launches; compiled elementwise neighbours count as one."""
    if not compiled:
        return len(kernels)
    return 2 * sum(kernel.kind != "other" for kernel in kernels) + 1


def _speed(kernel: Kernel, samples: float, parts: int, hardware: Hardware) -> float:
    if not FORMATS[kernel.dtype].is_low:
        return _plain_speed(kernel, samples, hardware)
    peak = peak_flops(hardware, kernel.dtype) * hardware.reach.get("clock", 1.0)
    if kernel.kind == "attention":
        usual = ATTENTION["Hopper" if hardware.device.startswith(HOPPER) else "other"]
        narrow = NARROW if kernel.shape and kernel.shape[-1].fixed < WIDE_HEAD else 1.0
        narrow *= MASKED if "cudnn" in kernel.name else 1.0  # without a mask it is called flash attention
        if "attention" not in hardware.reach:  # a mean over the lengths of published steps
            return peak * usual * narrow
        return peak * hardware.reach["attention"] * narrow * _attending(kernel, samples)
    reached = peak * hardware.reach.get("matmul", MATMUL)
    if not kernel.shape:
        return reached
    if kernel.kind == "convolution":
        return reached * _convolving(kernel, samples)
    _, rows, columns, inner = (size.at(samples) for size in kernel.shape)
    # The wider side of a divided matmul gets narrower.
    rows, columns = (rows / parts, columns) if rows > columns else (rows, columns / parts)
    if kernel.kind == "matmul" and min(rows, columns) <= 1:
        return inf  # a product with a vector only reads its matrix
    filled = _filled(rows) * _filled(columns)
    share, ramp = _alignment(kernel)
    ramp *= STARTING + (1 - STARTING) * filled
    if kernel.kind == "recurrent":
        filled = 1 / (SEQUENTIAL / filled + 1 - SEQUENTIAL)
    return reached * filled * inner / (inner / share + ramp)


def _attending(kernel: Kernel, samples: float) -> float:
    """Factor for the keys over which a query is summed, and for the blocks that run at once, relative to the usual."""
    if not kernel.shape:
        return 1.0
    heads, queries, keys, width = (size.at(samples) for size in kernel.shape)
    products = 5 if "backward" in kernel.name else 2
    share = kernel.flops.at(samples) / max(1.0, 2 * products * heads * queries * keys * width)  # causal: half
    # Backward sums over queries for each key too.
    summed = (min(queries, keys) if products == 5 else keys) * min(1.0, share)
    work = heads * -(-keys // QUERY_TILE) * share / PROCESSORS
    busy = work / (work + TAIL) if share < 1 else 1.0
    long_enough = summed / (summed + SHORT) * (USUAL_KEYS + SHORT) / USUAL_KEYS
    return long_enough * busy * (USUAL_WORK + TAIL) / USUAL_WORK


def _convolving(kernel: Kernel, samples: float) -> float:
    """The share of a matmul's speed that a convolution of this shape reaches."""
    if not kernel.shape:
        return 1.0
    _, _, columns, inner = (size.at(samples) for size in kernel.shape)
    return _filled(columns) * inner / (inner + RAMP)


def _plain_speed(kernel: Kernel, samples: float, hardware: Hardware) -> float:
    """Speed in fp32, which uses matrix units for convolutions only."""
    if kernel.kind == "convolution" and "tf32" in hardware.flops:
        way = TF32_BACKWARD if "backward" in kernel.name else 1.0
        return hardware.flops["tf32"] * hardware.reach.get("matmul", MATMUL) * _convolving(kernel, samples) * way
    return peak_flops(hardware, FULL.word) * PLAIN.get(kernel.kind, PLAIN["other"])


def is_unaligned(kernel: Kernel) -> bool:
    """Whether a 16-bit product has sides that its kernels load or store a few bytes at a time."""
    is_product = kernel.kind == "matmul" and len(kernel.shape) == 4
    return is_product and FORMATS[kernel.dtype].is_low and _alignment(kernel)[0] < 1


def _alignment(kernel: Kernel) -> tuple[float, float]:
    """Share of the usual rate and the ramp, by the sides of the matrices, except those that grow with the samples."""
    sides = [0 if size.each else int(size.fixed) for size in kernel.shape[1:]]
    if any(side % 2 for side in sides):
        return UNALIGNED["odd result" if sides[1] % 2 else "odd"]
    return UNALIGNED["even"] if any(side % PAD for side in sides) else (1.0, RAMP)


def _filled(size: float) -> float:
    """The share of the tiles that is filled."""
    size = max(1.0, size)
    return size / (-(-size // TILE) * TILE)


def peak_flops(hardware: Hardware, dtype: str) -> float:
    """Peak rate for a dtype; a dtype without hardware support is computed in fp32."""
    return hardware.flops.get(dtype) or hardware.flops.get(FULL.word) or next(iter(hardware.flops.values()))
