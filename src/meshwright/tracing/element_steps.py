"""Elements that a kernel without matrix products computes one at a time, where that and not memory limits its speed.

PyTorch's elementwise kernels read several elements at once if all operands have the same dense layout. With a strided,
broadcast or transposed operand they compute one address per element, and norms and softmaxes do more work per element
than their bytes show. A step is one element of a kernel with a broadcast operand; the weights below are the seconds per
element relative to that, from kernels that were timed alone on an H200 (4.1e11 steps a second).
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import torch

from meshwright.tracing.serial_steps import serial_steps

TRANSPOSED = 2.7
"""One operand varies fastest along another dim than the result: 1.5e11 elements a second."""
CAST = 1.1
"""Two bytes read and four written, or operands of several dtypes: 3.6e11."""
BROADCAST_CAST = 1.6
"""An operand is broadcast and has another dtype."""
SCALAR_CAST = 1.4
"""An operand is a single number of another dtype, in the device's memory."""
MASKED = 1.4
"""`masked_fill` with a broadcast mask."""
CACHE = 50e6
"""Bytes of an H200's L2 cache. A transposed operand that fits is read from there as fast as one in order."""
BATCH_NORMS = {"native_batch_norm": (2.9, 1.2), "native_batch_norm_backward": (5.3, 1.8)}
"""For one element of a channel, if every processor has a channel: 1.07e9 and 0.59e9 elements a second each. And how
many channels' blocks share a processor without slowing each other down."""
BATCH_NORMS_LAST = {"native_batch_norm": 1.66, "native_batch_norm_backward": 1.4}
"""With the channels innermost, as in a matrix of rows."""
SCATTERED, FAR = 4.4, 1024
"""Times the work of a batch norm's backward over (samples, channels, length) if the channels are innermost: PyTorch
has no kernel for it in this shape, and each address is this many bytes from the one before. With 128 bytes it takes
1.5 times the work."""
PROCESSORS = 132
"""Streaming multiprocessors."""
NORM_THREADS = (32, 512)
"""A batch norm goes through a channel's plane with a power of 2 of threads, at least and at most these. The last round
is not full, which shows while few channels are computed at a time: up to two for each processor."""
ROWS = {"native_layer_norm": 0.66, "native_group_norm": 2.3}
ROWS |= {"_softmax": 1.1, "_log_softmax": 1.1, "_safe_softmax": 2.5}
ROWS_BACKWARD = {"native_layer_norm_backward": 0.9, "native_group_norm_backward": 0.9}
AFFINE = 1.7
"""More for gradients of the affine weights, which are sums over all rows."""
AFFINE_ROW, TIMED = 1780, range(512, 1281)
"""A layer norm's sums give each processor 32 columns, and it goes through all rows: a row takes the same time with 512
columns as with 1280. Wider rows were not timed. Narrower ones are mostly more than 65536, which processors share."""
SHORT_ROW, WARP = 91, 32
"""A sum over the innermost dim takes a warp for each row, however short, or a part of one if the row is shorter."""
COLUMN_ROW = 650
"""For one row of a sum over rows: a block of 32 columns goes through all of them, so few columns leave most
processors idle. At most one step for each element."""
_TAPS = {"linear1d": 2, "bilinear2d": 4, "trilinear3d": 8, "bicubic2d": 16}
RESIZED = {f"upsample_{kind}{way}": taps for way in ("", "_backward") for kind, taps in _TAPS.items()}
"""How many elements each new one is made of."""
RESIZING, RESIZED_LAST, COLLIDING = 3.6, 4.8, 0.8
"""For one new element: in forward, in backward with the channels innermost, and in backward otherwise, for each of the
elements that it is made of and for each new one in a row that is made of them: all of these add to one place."""
SAMPLED = {"grid_sampler_2d": 0.65, "grid_sampler_2d_backward": 1.8}
"""For one element that is sampled, at places in the order of a raster."""
POOLS = {"avg_pool2d": 0.56, "avg_pool2d_backward": 1.33}
"""For one element of one window: 7.3e11 and 3.1e11 a second. Backward divides to find the windows of each element."""
COLUMNS = {"im2col": 2.2, "col2im": 4.0}
"""For one element of the unfolded tensor."""
FILLED = 0.095
"""For one byte of zeros."""
PADDINGS = ("slice_backward", "select_backward", "constant_pad_nd")
"""Operators that fill a tensor with zeros and copy another into a part of it."""
SOFTMAX_BACKWARD = 0.55
"""For one byte of an element's dtype."""
INDEXED = {"gather": 1.3, "scatter_add": 2.3, "scatter_add_": 2.3, "index_put": 1.6, "index_put_": 1.6}
SORTED_INDEX, ADDED_ACROSS = 86, 66
"""`index_put` that adds sorts its indices, and adds up the values of each place one after another. If the first dim is
not indexed, it takes this many steps for each element: 6e9 a second (gradients of `x[:, :, i, j]`, of `x[:, i]`)."""
ATOMIC, ATOMIC_ACROSS = 2.4, 6.0
"""For one element that compiled code adds to memory that others add to: 1.7e11 a second for rows of a table, 7e10 where
the first dim is not indexed, as in an interpolation's gradient, whose neighbours add to one place."""
SORTING, UNSORTED, SCATTERING = 5.7e7, 3072, 4.4
"""Steps in the 0.14 ms that an embedding's gradient takes to begin to sort its indices, the most that it does not sort,
and steps to add up one element of the sorted ones."""
SORTED_ROW, CROWDED = 71, 2**16
"""For each sorted index, as many again if a row has more than `CROWDED` of them: 33.5 million indices take 6 ms, and 13
for a table of 64 rows (docs/data/collisions_gpu.json)."""
COLLIDING_ATOMIC, APART = 123, 256
"""For each value that compiled code adds to a table of few rows, where all wait for each other: 3.3e9 a second with one
column and up to `APART` rows, more in proportion to both (same file)."""
GROUPED = {"usual": (0.43, 0.7), "last": (0.093, 0.117), "last, fp32": (0.43, 1.4)}
"""For one product of a depthwise convolution, forward and backward, by layout: 9.6e11 and 5.8e11 a second in the usual
one; with channels last 4.4e12 and 3.5e12 in 16 bits, and 3e11 in fp32's backward."""
GROUP, FASTER = 4, 6.5
"""In 16 bits, groups of at least so many channels are computed by matrix units, at so many times that rate: of one
step, that of a ResNeXt-50 with 32 groups (docs/unseen.md)."""
FEW_CHANNELS = {2: 8, 4: 4}
"""Input channels, by the bytes of an element, below which no matrix unit computes a convolution."""
FEW, SHORT_SUM, FULL_TILE = {2: (0.027, 0.019), 4: (0.021, 0.015)}, 60, 64
"""For one product of such a convolution, forward and backward: in 16 bits 1.5e13 and 2.2e13 a second, if each result
sums over many more than `SHORT_SUM`, and there are as many output channels as a tile has columns. From the first layers
of nine models on an H200, of which one is in fp32."""
MOST_PRODUCTS = 4096
"""Products for one result of one group up to which groups count as narrow: one channel, and a kernel of 64 x 64."""
COPIES = frozenset(("clone", "copy_", "_to_copy", "contiguous"))


def convolution_steps(shape: tuple[int, ...], given: list[torch.Tensor], gradients: int) -> float:
    """The steps of a convolution of few channels or groups of them, which no matrix unit computes; 0 for another one.

    `gradients` are how many of its input's and weight's are computed: none in forward.
    """
    if not shape:
        return 0.0
    return _grouped_steps(shape, given, backward=gradients > 0) if shape[0] > 1 else _few_steps(shape, given, gradients)


def _few_steps(shape: tuple[int, ...], given: list[torch.Tensor], gradients: int) -> float:
    weight = given[1 + (gradients > 0)]
    if weight.shape[1] >= FEW_CHANNELS.get(weight.itemsize, 0):
        return 0.0
    sums, tiles = 1 + SHORT_SUM / shape[3], max(1.0, FULL_TILE / shape[2])
    return prod(shape) * max(1, gradients) * sums * tiles * FEW[weight.itemsize][gradients > 0]


def _grouped_steps(shape: tuple[int, ...], given: list[torch.Tensor], *, backward: bool) -> float:
    if shape[2] * shape[3] > MOST_PRODUCTS:
        return 0.0
    channels_last = any(_fastest(leaf) == 1 for leaf in given[: 1 + backward] if leaf.dim() == 4)
    layout = ("last, fp32" if given[0].itemsize > 2 else "last") if channels_last else "usual"
    # The input's gradient goes through the kernel's products for each pixel of the input, also of those that a stride
    # skips; the weight's gradient for each of the output.
    passes = 1 + (given[1][0, 0].numel() / given[0][0, 0].numel()) if backward else 1
    faster = FASTER if given[0].itemsize == 2 and shape[2] >= GROUP else 1.0
    return prod(shape) * passes * GROUPED[layout][backward] / faster


def element_steps(func: Any, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """The steps of an operator with these arguments and results; 0 if only its bytes count."""
    name, operands = func.overloadpacket.__name__, [leaf for leaf in (*given, *made) if leaf.dim()]
    if not operands or not made:
        return 0.0
    size = max(leaf.numel() for leaf in operands)
    return max(serial_steps(name, args, given, made), _own_steps(func, name, args, given, made, size))


def _own_steps(
    func: Any, name: str, args: Any, given: list[torch.Tensor], made: list[torch.Tensor], size: int
) -> float:
    if name in BATCH_NORMS:
        return _batch_norm_steps(name, given[0])
    if name in ROWS:
        return size * (ROWS[name] + TRANSPOSED * _copied(given, size))
    if name in ROWS_BACKWARD:
        steps = size * (ROWS_BACKWARD[name] + TRANSPOSED * _copied(given, size))
        return steps + (_affine_steps(name, size, given[0].shape[-1]) if len(made) > 1 else 0.0)
    if name == "_softmax_backward_data":
        return size * SOFTMAX_BACKWARD * given[0].itemsize
    if name == "embedding_dense_backward":
        return _embedding_steps(given[0].numel(), given[-1].numel(), rows=made[0].shape[0])
    if name in INDEXED:
        return _adding_steps(args, size) if _adds(name, args) else size * INDEXED[name]
    if name in POOLS:
        results, x, window = (given[0], given[1], args[2]) if "backward" in name else (made[0], given[0], args[1])
        # A window may be larger than the plane, to take its mean.
        taps = prod(map(min, _pair(window), x.shape[-2:]))
        return results.numel() * taps * POOLS[name]
    if name in RESIZED:
        return _resizing_steps(name, given[0], made[0])
    if name in SAMPLED:
        return float((given[0] if "backward" in name else made[0]).numel() * SAMPLED[name])
    if name in COLUMNS:
        return size * (COLUMNS[name] + (TRANSPOSED if name == "col2im" and not given[0].is_contiguous() else 0))
    if name in PADDINGS:
        moved = TRANSPOSED if _fastest(given[0]) != _fastest(made[0]) else 1.0
        return given[0].numel() * moved + made[0].numel() * made[0].itemsize * FILLED
    if torch.Tag.pointwise in func.tags or name in COPIES:
        weight = _weight(given, made[0], size)
        return size * (max(weight, MASKED) if name == "masked_fill" and weight else weight)
    if made[0].numel() >= size:
        return 0.0
    return _reduction_steps(args, [leaf for leaf in (*given, *made) if leaf.dim()], made[0], size)


def compiled_scatter_steps(args: Any) -> float:
    """The steps of a scatter in compiled code, whose last tensor has the values."""
    onto, values = args[0], [leaf for leaf in args if isinstance(leaf, torch.Tensor)][-1]
    indices = next((arg for arg in args if isinstance(arg, list | tuple)), ())  # none of a scatter along a dim
    if not indices or not onto.numel():
        return float(ATOMIC * values.numel())
    if indices[0] is None:
        return float(ATOMIC_ACROSS * values.numel())
    rows = prod(onto.shape[: len(indices)])
    return float((ATOMIC + COLLIDING_ATOMIC * min(1.0, APART / rows) * rows / onto.numel()) * values.numel())


def _embedding_steps(values: int, indices: int, rows: int) -> float:
    if indices <= UNSORTED:
        return 0.0
    crowds = 1 + (indices > CROWDED * rows)
    return SORTING + SORTED_ROW * indices * crowds + SCATTERING * values


def _adds(name: str, args: Any) -> bool:
    """Whether an `index_put` adds to what is there."""
    return name.startswith("index_put") and len(args) > 3 and bool(args[3])


def _adding_steps(args: Any, size: int) -> float:
    indices = [index for index in args[1] if index is not None]
    each = INDEXED["index_put"] if args[1][0] is not None else ADDED_ACROSS
    sorted_first: int = max(index.numel() for index in indices)
    return size * each + SORTED_INDEX * sorted_first


def _resizing_steps(name: str, given: torch.Tensor, made: torch.Tensor) -> float:
    if "backward" not in name:
        return made.numel() * RESIZING
    if _fastest(given) == 1:
        return given.numel() * RESIZED_LAST
    return given.numel() * RESIZED[name] * COLLIDING * max(1.0, given.shape[-1] / made.shape[-1])


def _batch_norm_steps(name: str, x: torch.Tensor) -> float:
    is_innermost = x.dim() > 1 and _fastest(x) == 1
    if is_innermost and x.dim() != 3:
        return BATCH_NORMS_LAST[name] * x.numel()
    channels = x.shape[1] if x.dim() > 1 else 1
    each, resident = BATCH_NORMS[name]
    apart = x.shape[1] * x.itemsize if is_innermost and "backward" in name else 0
    scattered = max(1.0, SCATTERED * min(1.0, sqrt(apart / FAR)))
    idle = _unfilled(x[0, 0].numel()) if x.dim() > 2 and not is_innermost and channels <= 2 * PROCESSORS else 1.0
    return idle * scattered * each * x.numel() / channels * max(PROCESSORS, channels / resident)


def _unfilled(plane: int) -> float:
    """How much longer the rounds of a batch norm's threads take than if the last one were full."""
    least, most = NORM_THREADS
    threads = min(most, max(least, 1 << (plane - 1).bit_length()))
    return -(-plane // threads) * threads / max(1, plane)


def _affine_steps(name: str, size: int, width: int) -> float:
    """Steps of summing the gradients of a norm's weights over all rows."""
    if name != "native_layer_norm_backward" or width not in TIMED:
        return size * AFFINE
    return size / width * AFFINE_ROW


def _reduction_steps(args: Any, operands: list[torch.Tensor], result: torch.Tensor, size: int) -> float:
    """Steps of an operator whose result is smaller than its largest operand."""
    largest = next(leaf for leaf in operands if leaf.numel() == size)
    if _fastest(largest) not in (None, largest.dim() - 1):
        return size * TRANSPOSED
    if largest.dim() == 2 and result.numel() == largest.shape[1]:
        return float(min(size, largest.shape[0] * COLUMN_ROW))
    row = size / max(1, result.numel())
    return result.numel() * SHORT_ROW * min(1.0, row / WARP) if _reduces_innermost(args, largest, result) else 0.0


def _reduces_innermost(args: Any, largest: torch.Tensor, result: torch.Tensor) -> bool:
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else args[1:2]
    if not dims or any(type(dim) is not int for dim in dims):
        return result.numel() * largest.shape[-1] <= largest.numel()
    return largest.dim() - 1 in (dim % largest.dim() for dim in dims)


def _pair(window: Any) -> tuple[int, ...]:
    """A window's sides: one number stands for both."""
    return tuple(window) * 2 if len(window) == 1 else tuple(window)


def _weight(given: list[torch.Tensor], result: torch.Tensor, size: int) -> float:
    """Steps per element of an elementwise kernel."""
    whole = [leaf for leaf in given if leaf.numel() == size and leaf.dim()]
    fastest = _fastest(result)
    if fastest is not None and any(_is_transposed(leaf, result, fastest) for leaf in given):
        return TRANSPOSED
    layouts = {tuple(leaf.squeeze().stride()) for leaf in (*whole, result)}
    numbers = [leaf for leaf in given if leaf.is_floating_point()]
    casts = len({leaf.dtype for leaf in numbers}) > 1
    if len(layouts) > 1 or any(leaf.dim() and leaf.numel() < size for leaf in given):
        return BROADCAST_CAST if casts else 1.0
    if casts and any(not leaf.dim() for leaf in numbers):
        return SCALAR_CAST
    return CAST if casts or any(leaf.itemsize < result.itemsize for leaf in numbers) else 0.0


def _is_transposed(leaf: torch.Tensor, result: torch.Tensor, fastest: int) -> bool:
    """Whether an operand varies fastest along another dim than the result, and is not read from a cache."""
    if leaf.dim() != result.dim() or leaf.shape[fastest] != result.shape[fastest]:
        return False
    if leaf.shape != result.shape and leaf.numel() * leaf.itemsize <= CACHE:
        return False
    # A stride of 0 repeats one element.
    return bool(leaf.stride(fastest)) and _fastest(leaf) != fastest


def _copied(given: list[torch.Tensor], size: int) -> int:
    """How many inputs are transposed, and so copied before the kernel runs."""
    return sum(leaf.numel() == size and not leaf.is_contiguous() for leaf in given)


def _fastest(tensor: torch.Tensor) -> int | None:
    """The dim with the smallest stride; None if no dim has two elements at different addresses."""
    moving = [(stride, -dim) for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))]
    moving = [pair for pair in moving if pair[0] > 0 and tensor.shape[-pair[1]] > 1]
    return -min(moving)[1] if moving else None
