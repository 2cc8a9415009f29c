"""What operators other than convolutions and recurrent layers take of a GPU's memory besides their results.

    python benchmarks/operator_workspaces_gpu.py measure --json operator_workspaces.json   # on the GPU; half a minute
    PYTHONPATH=src python benchmarks/operator_workspaces_gpu.py score                      # the trace's rules beside it

Each operator runs twice; the allocator's history of the second call is kept: requests other than results, in order, and
the most that they held at a time. An operator that a device does not run is a row that says why.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from workspaces_gpu import MARK

aten = torch.ops.aten
RESULTS = Path(__file__).parents[1] / "docs" / "data" / "operator_workspaces_gpu.json"
NEAR = 1 << 20
"""Bytes by which a rule may be off and still counts as right."""
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Random:
    """A tensor of random numbers."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    order: tuple[int, ...] = ()
    """Dims from the outermost in memory; none if they lie in their own order."""
    below: int = 0
    """Whole numbers smaller than this in place of fractions."""
    gap: int | None = None
    """A dim of which only the first element is taken."""

    def on(self, device: str) -> Tensor:
        order = self.order or tuple(range(len(self.shape)))
        dtype = torch.long if self.below else getattr(torch, self.dtype)
        flat = torch.empty([self.shape[dim] for dim in order], dtype=dtype, device=device)
        if device != "meta":
            flat = flat.random_(self.below or 2) if self.below or dtype == torch.bool else flat.uniform_()
        tensor = flat.permute([order.index(dim) for dim in range(len(self.shape))])
        return tensor if self.gap is None else tensor.select(self.gap, 0)


@dataclass(frozen=True)
class Call:
    """A case: an operator and its arguments, with `Random` for tensors."""

    name: str
    operator: Any
    arguments: tuple[Any, ...]

    def given(self, device: str) -> Any:
        return tree_map(lambda leaf: leaf.on(device) if isinstance(leaf, Random) else leaf, self.arguments)


def cases() -> Iterator[Call]:
    yield from look_ups()
    for dtype in DTYPES:
        yield from rows_across(dtype)
        yield from pictures(dtype)
        yield from products(dtype)
        yield from reductions(dtype)
        yield from losses(dtype)
        yield from resampling(dtype)
        yield from norms(dtype)
    yield from sorting()
    yield from transforms()


def look_ups() -> Iterator[Call]:
    """Gradients of rows that were looked up, and values that are written at indices."""
    backward = aten.embedding_dense_backward.default
    for count, entries, width, dtype in (
        (819_200, 500_000, 256, "float32"),
        (102_400, 500_000, 256, "float32"),
        (100_000, 1_000, 64, "float32"),
        (50_000, 3_000, 100, "float32"),
        (16_384, 50_257, 1_024, "bfloat16"),
        (32_768, 128_256, 4_096, "bfloat16"),
        (3_072, 30_000, 512, "bfloat16"),
        (3_073, 30_000, 512, "bfloat16"),
    ):
        gradient, indices = Random((count, width), dtype), Random((count,), below=entries)
        name = f"embedding gradient, {count} of {entries} x {width} {dtype}"
        yield Call(name, backward, (gradient, indices, entries, -1, False))
    gradient, indices = Random((102_400, 8, 256), order=(0, 2, 1)), Random((102_400, 8), below=500_000)
    yield Call("embedding gradient, transposed", backward, (gradient, indices, 500_000, -1, False))

    accumulate = aten._index_put_impl_.default
    for count, rows, width, dtype in (
        (200_000, 500_000, 64, "float32"),
        (400_000, 100_000, 256, "bfloat16"),
        (800_000, 50_000, 1, "float32"),
    ):
        onto, values = Random((rows, width), dtype), Random((count, width), dtype)
        name = f"index gradient, {count} of {rows} x {width} {dtype}"
        yield Call(name, accumulate, (onto, [Random((count,), below=rows)], values, True, True))
    onto, values = Random((64, 2_000, 256)), Random((64, 5_000, 256))
    indices = Random((5_000,), below=2_000)
    yield Call("index gradient, second dim", accumulate, (onto, [None, indices], values, True, True))
    places, values = Random((200_000,), below=512), Random((200_000, 64))
    onto = Random((512, 512, 64))
    yield Call("index gradient, two indices", accumulate, (onto, [places, places], values, True, True))
    table, indices = Random((500_000, 64)), Random((200_000,), below=500_000)
    yield Call("index put", aten.index_put.default, (table, [indices], values, False))
    yield Call("index add", aten.index_add.default, (table, 0, indices, values))
    spread = Random((200_000, 64), below=100_000)
    yield Call("scatter add", aten.scatter_add.default, (Random((100_000, 64)), 0, spread, values))


def rows_across(dtype: str) -> Iterator[Call]:
    """Operators on rows whose elements do not lie side by side."""
    even, odd = Random((64, 512, 1_024), dtype), Random((64, 512, 1_024), dtype, order=(0, 2, 1))
    statistic, weight = Random((64, 512, 1)), Random((1_024,), dtype)
    number = getattr(torch, dtype)
    yield Call(f"layer norm {dtype}", aten.native_layer_norm.default, (odd, [1_024], weight, weight, 1e-5))
    for which, gradient, x in (("gradient", odd, even), ("input", even, odd)):
        norm = (gradient, x, [1_024], statistic, statistic, weight, weight, [True] * 3)
        yield Call(f"layer norm backward, {which} {dtype}", aten.native_layer_norm_backward.default, norm)
    yield Call(f"rms norm {dtype}", aten._fused_rms_norm.default, (odd, [1_024], weight, 1e-5))
    norm = (odd, even, [1_024], statistic, weight, [True] * 2)
    yield Call(f"rms norm backward, gradient {dtype}", aten._fused_rms_norm_backward.default, norm)
    yield Call(f"softmax {dtype}", aten._softmax.default, (odd, -1, False))
    yield Call(f"softmax backward {dtype}", aten._softmax_backward_data.default, (odd, even, -1, number))
    yield Call(f"softmax backward, dense {dtype}", aten._softmax_backward_data.default, (even, even, -1, number))
    yield Call(f"softmax backward, result {dtype}", aten._softmax_backward_data.default, (even, odd, -1, number))
    yield Call(f"log softmax {dtype}", aten._log_softmax.default, (odd, -1, False))
    yield Call(f"log softmax backward {dtype}", aten._log_softmax_backward_data.default, (odd, even, -1, number))
    yield Call(f"glu {dtype}", aten.glu.default, (odd, -1))
    half = Random((64, 512, 512), dtype, order=(0, 2, 1))
    yield Call(f"glu backward {dtype}", aten.glu_backward.default, (half, odd, -1))


def pictures(dtype: str) -> Iterator[Call]:
    weight = Random((96,), dtype)
    for layout, order in (("channels last", (0, 2, 3, 1)), ("crooked", (2, 3, 1, 0))):
        image = Random((64, 96, 56, 56), dtype, order=order)
        norm = (image, weight, weight, 64, 96, 3_136, 8, 1e-5)
        yield Call(f"group norm, {layout} {dtype}", aten.native_group_norm.default, norm)
        yield Call(f"average pool, {layout} {dtype}", aten.avg_pool2d.default, (image, [2, 2], [2, 2]))
        yield Call(f"max pool, {layout} {dtype}", aten.max_pool2d_with_indices.default, (image, [2, 2], [2, 2]))
        yield Call(f"bilinear, {layout} {dtype}", aten.upsample_bilinear2d.default, (image, [112, 112], False))


def products(dtype: str) -> Iterator[Call]:
    weight = Random((1_024, 1_024), dtype)
    rows, elements = Random((8_192, 2, 1_024), dtype, gap=1), Random((8_192, 1_024, 2), dtype, gap=2)
    yield Call(f"product, rows with gaps {dtype}", aten.mm.default, (rows, weight))
    yield Call(f"product, elements with gaps {dtype}", aten.mm.default, (elements, weight))
    inside, plain = Random((64, 512, 256), dtype, order=(1, 2, 0)), Random((64, 256, 512), dtype)
    yield Call(f"batched product, batch inside {dtype}", aten.bmm.default, (inside, plain))
    left, right = Random((64, 512, 256), dtype, order=(1, 0, 2)), Random((64, 256, 512), dtype, order=(2, 0, 1))
    yield Call(f"batched product, heads between {dtype}", aten.bmm.default, (left, right))


def reductions(dtype: str) -> Iterator[Call]:
    """PyTorch's own kernels divide long columns among thread blocks."""
    x = Random((8_192, 4_096), dtype)
    yield Call(f"sum of rows {dtype}", aten.sum.dim_IntList, (x, [0]))
    yield Call(f"mean of rows {dtype}", aten.mean.dim, (x, [0]))
    yield Call(f"largest of rows {dtype}", aten.amax.default, (x, [0]))
    yield Call(f"variance of rows {dtype}", aten.var_mean.correction, (x, [0]))
    yield Call(f"norm of rows {dtype}", aten.linalg_vector_norm.default, (x, 2, [0]))
    yield Call(f"sum of all {dtype}", aten.sum.default, (x,))
    yield Call(f"mean of columns {dtype}", aten.mean.dim, (x, [1]))
    yield Call(f"argmax of rows {dtype}", aten.argmax.default, (x, 0))


def losses(dtype: str) -> Iterator[Call]:
    """Losses and normalisers that PyTorch composes of several kernels behind one operator."""
    x, number = Random((8_192, 4_096), dtype), getattr(torch, dtype)
    scale = Random((), dtype)
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"):
        operator = getattr(aten, name).default
        more = (None,) if name == "binary_cross_entropy" else ()
        yield Call(f"{name}, mean {dtype}", operator, (x, x, *more, 1))
        yield Call(f"{name}, all {dtype}", operator, (x, x, *more, 0))
    logits = aten.binary_cross_entropy_with_logits.default
    yield Call(f"binary cross-entropy of logits, mean {dtype}", logits, (x, x, None, None, 1))
    yield Call(f"binary cross-entropy of logits, all {dtype}", logits, (x, x, None, None, 0))
    yield Call(f"binary cross-entropy of logits, weighted {dtype}", logits, (x, x, None, Random((4_096,), dtype), 1))
    yield Call(f"smooth_l1_loss backward {dtype}", aten.smooth_l1_loss_backward.default, (scale, x, x, 1, 1.0))
    yield Call(f"mse_loss backward {dtype}", aten.mse_loss_backward.default, (scale, x, x, 1))
    yield Call(f"logsumexp {dtype}", aten.logsumexp.default, (x, [-1]))
    yield Call(f"logsumexp of rows {dtype}", aten.logsumexp.default, (x, [0]))
    yield Call(f"safe softmax {dtype}", aten._safe_softmax.default, (x, -1))
    yield Call(f"product of all {dtype}", aten.prod.default, (x,))
    yield Call(f"product of columns {dtype}", aten.prod.dim_int, (x, 1))
    yield Call(f"log sigmoid {dtype}", aten.log_sigmoid_forward.default, (x,))
    yield Call(f"log sigmoid backward {dtype}", aten.log_sigmoid_backward.default, (x, x, x))
    yield Call(f"gelu backward {dtype}", aten.gelu_backward.default, (x, x))
    yield Call(f"silu backward {dtype}", aten.silu_backward.default, (x, x))
    yield Call(f"softplus backward {dtype}", aten.softplus_backward.default, (x, x, 1.0, 20.0))
    yield Call(f"prelu backward {dtype}", aten._prelu_kernel_backward.default, (x, x, Random((1, 4_096), dtype)))
    yield Call(f"norm {dtype}", aten.linalg_vector_norm.default, (x,))
    yield Call(f"standard deviation {dtype}", aten.std.correction, (x, [1]))
    yield Call(f"masked fill {dtype}", aten.masked_fill.Scalar, (x, Random((8_192, 4_096), "bool"), 0.0))
    yield Call(f"softmax of rows {dtype}", aten._softmax.default, (x, 0, False))
    yield Call(f"softmax of rows, backward {dtype}", aten._softmax_backward_data.default, (x, x, 0, number))
    yield Call(f"log softmax of rows, backward {dtype}", aten._log_softmax_backward_data.default, (x, x, 0, number))


def resampling(dtype: str) -> Iterator[Call]:
    """Operators that gather or spread the elements of pictures, volumes and sequences."""
    image, large = Random((32, 64, 56, 56), dtype), Random((32, 64, 112, 112), dtype)
    sizes = ([112, 112], [32, 64, 56, 56], False)
    yield Call(f"bilinear backward {dtype}", aten.upsample_bilinear2d_backward.default, (large, *sizes))
    yield Call(f"bicubic {dtype}", aten.upsample_bicubic2d.default, (image, [112, 112], False))
    yield Call(f"bicubic backward {dtype}", aten.upsample_bicubic2d_backward.default, (large, *sizes))
    yield Call(f"nearest backward {dtype}", aten.upsample_nearest2d_backward.default, (large, *sizes[:2]))
    yield Call(
        f"average pool backward {dtype}",
        aten.avg_pool2d_backward.default,
        (image, large, [2, 2], [2, 2], [0, 0], False, True, None),
    )
    places = Random((32, 64, 56, 56), below=3_136)
    pooled = (image, large, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
    yield Call(f"max pool backward {dtype}", aten.max_pool2d_with_indices_backward.default, pooled)
    yield Call(f"adaptive average pool {dtype}", aten._adaptive_avg_pool2d.default, (large, [7, 7]))
    yield Call(
        f"adaptive average pool backward {dtype}",
        aten._adaptive_avg_pool2d_backward.default,
        (Random((32, 64, 7, 7), dtype), large),
    )
    volume = Random((8, 32, 32, 56, 56), dtype)
    yield Call(f"max pool of volumes {dtype}", aten.max_pool3d_with_indices.default, (volume, [2, 2, 2], [2, 2, 2]))
    yield Call(f"average pool of volumes {dtype}", aten.avg_pool3d.default, (volume, [2, 2, 2], [2, 2, 2]))
    yield Call(f"reflection pad {dtype}", aten.reflection_pad2d.default, (image, [1, 1, 1, 1]))
    yield Call(
        f"reflection pad backward {dtype}",
        aten.reflection_pad2d_backward.default,
        (Random((32, 64, 58, 58), dtype), image, [1, 1, 1, 1]),
    )
    yield Call(f"columns of pictures {dtype}", aten.im2col.default, (image, [3, 3], [1, 1], [1, 1], [1, 1]))
    columns = Random((32, 576, 3_136), dtype)
    yield Call(f"pictures of columns {dtype}", aten.col2im.default, (columns, [56, 56], [3, 3], [1, 1], [1, 1], [1, 1]))
    grid = Random((32, 56, 56, 2), dtype)
    yield Call(f"grid sample {dtype}", aten.grid_sampler_2d.default, (image, grid, 0, 0, False))
    sampled = (image, image, grid, 0, 0, False, [True, True])
    yield Call(f"grid sample backward {dtype}", aten.grid_sampler_2d_backward.default, sampled)
    table, indices, values = (
        Random((50_000, 64), dtype),
        Random((200_000, 64), below=50_000),
        Random((200_000, 64), dtype),
    )
    yield Call(f"scatter, largest {dtype}", aten.scatter_reduce.two, (table, 0, indices, values, "amax"))
    yield Call(f"scatter, mean {dtype}", aten.scatter_reduce.two, (table, 0, indices, values, "mean"))
    one = Random((200_000,), below=50_000)
    yield Call(f"index, mean {dtype}", aten.index_reduce.default, (table, 0, one, values, "mean"))
    yield Call(
        f"index add, second dim {dtype}",
        aten.index_add.default,
        (Random((64, 50_000), dtype), 1, one, Random((64, 200_000), dtype)),
    )


def norms(dtype: str) -> Iterator[Call]:
    """Normalisations of dense tensors, and their gradients."""
    for rows, width in ((32_768, 1_024), (1_000_000, 64)):
        x, weight, statistic = Random((rows, width), dtype), Random((width,), dtype), Random((rows, 1))
        norm = (x, x, [width], statistic, statistic, weight, weight, [True] * 3)
        yield Call(f"layer norm backward, {rows} x {width} {dtype}", aten.native_layer_norm_backward.default, norm)
        norm = (x, x, [width], statistic, weight, [True] * 2)
        yield Call(f"rms norm backward, {rows} x {width} {dtype}", aten._fused_rms_norm_backward.default, norm)
    channel, mean = Random((96,), dtype), Random((64, 8))
    channel32 = Random((96,))
    for layout, order in (("dense", (0, 1, 2, 3)), ("channels last", (0, 2, 3, 1))):
        image = Random((64, 96, 56, 56), dtype, order=order)
        norm = (image, image, mean, mean, channel, 64, 96, 3_136, 8, [True] * 3)
        if layout == "dense":
            yield Call(
                f"group norm, dense {dtype}",
                aten.native_group_norm.default,
                (image, channel, channel, 64, 96, 3_136, 8, 1e-5),
            )
            yield Call(f"group norm backward {dtype}", aten.native_group_norm_backward.default, norm)
        statistics = (channel32, channel32)
        yield Call(
            f"batch norm, {layout} {dtype}",
            aten.native_batch_norm.default,
            (image, channel32, channel32, *statistics, True, 0.1, 1e-5),
        )
        norm = (image, image, channel32, *statistics, *statistics, True, 1e-5, [True] * 3)
        yield Call(f"batch norm backward, {layout} {dtype}", aten.native_batch_norm_backward.default, norm)
        yield Call(
            f"batch norm by cuDNN, {layout} {dtype}",
            aten.cudnn_batch_norm.default,
            (image, channel32, channel32, *statistics, True, 0.1, 1e-5),
        )
    weight = Random((4_096, 4_096), dtype)
    yield Call(f"weight norm {dtype}", aten._weight_norm_interface.default, (weight, Random((4_096, 1), dtype)))


def sorting() -> Iterator[Call]:
    words = Random((256, 50_257))
    yield Call("sort, long rows", aten.sort.default, (Random((64, 200_000)), -1, False))
    yield Call("sort, short rows", aten.sort.default, (Random((20_000, 196)), -1, False))
    yield Call("sort, one row", aten.sort.default, (Random((8_000_000,)), -1, False))
    yield Call("top k, long rows", aten.topk.default, (words, 50))
    yield Call("top k, short rows", aten.topk.default, (Random((65_536, 64)), 8))
    yield Call("cumulative sum, one row", aten.cumsum.default, (Random((16_000_000,)), 0))
    yield Call("cumulative sum, rows", aten.cumsum.default, (Random((16_000, 1_000)), 1))
    yield Call("cumulative sum, columns", aten.cumsum.default, (Random((16_000, 1_000)), 0))
    row, mask = Random((4_000_000,)), Random((4_000_000,), "bool")
    yield Call("masked scatter", aten.masked_scatter.default, (row, mask, row))
    yield Call("multinomial", aten.multinomial.default, (words, 1))
    yield Call("median", aten.median.dim, (Random((20_000, 500)), -1))


def transforms() -> Iterator[Call]:
    for length in (1_024, 1_000, 1_021):
        whole = Random((4_096, length), "complex64")
        half = Random((4_096, length // 2 + 1), "complex64")
        yield Call(f"r2c {length}", aten._fft_r2c.default, (Random((4_096, length)), [1], 0, True))
        yield Call(f"c2c {length}", aten._fft_c2c.default, (whole, [1], 0, True))
        yield Call(f"c2r {length}", aten._fft_c2r.default, (half, [1], 0, length))
    yield Call("r2c of pictures", aten._fft_r2c.default, (Random((64, 64, 128, 128)), [2, 3], 0, True))
    points = Random((16, 2_048, 64))
    yield Call("distances", aten._cdist_forward.default, (points, points, 2.0, None))
    yield Call("distances, by elements", aten._cdist_forward.default, (points, points, 1.0, None))
    for count, size in ((4_096, 32), (16, 512)):
        matrix = Random((count, size, size))
        yield Call(f"cholesky {count} x {size}", aten.linalg_cholesky_ex.default, (matrix,))
        yield Call(f"inverse {count} x {size}", aten.linalg_inv_ex.default, (matrix,))
        yield Call(f"solution {count} x {size}", aten._linalg_solve_ex.default, (matrix, matrix))
        yield Call(f"qr {count} x {size}", aten.linalg_qr.default, (matrix,))
        yield Call(f"singular values {count} x {size}", aten._linalg_svd.default, (matrix,))
        yield Call(f"eigenvalues {count} x {size}", aten._linalg_eigh.default, (matrix,))
        yield Call(f"exponential {count} x {size}", aten.linalg_matrix_exp.default, (matrix,))
    yield Call("cumulative product", aten.cumprod.default, (Random((16_000, 1_000)), 1))
    yield Call("cumulative log sum exp", aten.logcumsumexp.default, (Random((16_000, 1_000)), 1))
    yield Call("cumulative largest", aten.cummax.default, (Random((16_000, 1_000)), 1))
    yield Call("search", aten.searchsorted.Tensor, (Random((1_000,)), Random((4_000_000,))))
    yield Call("rolled", aten.roll.default, (Random((16_000, 1_000)), [1], [1]))
    yield Call("flipped", aten.flip.default, (Random((16_000, 1_000)), [1]))
    yield Call("repeated", aten.repeat.default, (Random((1_600, 1_000)), [4, 1]))


def requests_of(case: Call, given: Any) -> tuple[list[int], int]:
    """Requests besides results, and the most bytes that they held at a time."""
    mark = torch.empty(MARK, dtype=torch.uint8, device="cuda")
    found = case.operator(*given)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    begin = max(i for i, e in enumerate(trace) if e["action"] == "alloc" and e["addr"] == mark.data_ptr())
    events = [event for event in trace[begin + 1 :] if event["action"] in ("alloc", "free_completed")]
    results = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(found) if isinstance(tensor, Tensor)}
    last = {event["addr"]: place for place, event in enumerate(events) if event["action"] == "alloc"}
    live: dict[int, int] = {}
    requests: list[int] = []
    most = 0
    for place, event in enumerate(events):
        address = event["addr"]
        if event["action"] == "free_completed":
            live.pop(address, None)
        elif address not in results or last[address] != place:
            live[address] = event["size"]
            requests.append(event["size"])
            most = max(most, sum(live.values()))
    return requests, most


def measure(path: Path) -> None:
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000)
    rows = []
    for case in cases():
        row: dict[str, Any] = {"case": case.name}
        try:
            given = case.given("cuda")
            case.operator(*given)
            torch.cuda.synchronize()
            row["requests"], row["held"] = requests_of(case, given)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
        print(json.dumps(row), flush=True)
    text = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name()})
    path.write_text(f'{head[:-1]},\n"rows": [\n{text}\n]}}\n')


def rule(case: Call) -> int:
    """The most bytes that the trace adds for a case at a time."""
    from meshwright.describe.as_on_cuda import as_on_cuda
    from meshwright.tracing.workspaces import operator_workspaces

    with as_on_cuda():
        given = case.given("meta")
        found = case.operator(*given)
        return max((sum(held) for held in operator_workspaces(case.operator, given, found)), default=0)


def score() -> None:
    truth = {row["case"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    right = known = 0
    for case in cases():
        held = truth.get(case.name, {}).get("held")
        if held is None:
            continue
        told, known = rule(case), known + 1
        near = abs(told - held) <= NEAR
        right += near
        if not near:
            print(f"{case.name}: {told / 2**20:.1f} MiB told, {held / 2**20:.1f} in truth")
    print(f"{right} of {known} within {NEAR >> 20} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "score"])
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where to write (default: {RESULTS.name})")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.json)
    else:
        score()


if __name__ == "__main__":
    main()
