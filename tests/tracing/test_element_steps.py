"""Elements that kernels compute one at a time, by the layout of their operands."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.tracing import element_steps
from meshwright.tracing.element_steps import (
    AFFINE,
    AFFINE_ROW,
    APART,
    ATOMIC,
    ATOMIC_ACROSS,
    BROADCAST_CAST,
    CACHE,
    CAST,
    COLLIDING,
    COLLIDING_ATOMIC,
    COLUMN_ROW,
    COLUMNS,
    CROWDED,
    FASTER,
    FILLED,
    MASKED,
    POOLS,
    RESIZED_LAST,
    RESIZING,
    SAMPLED,
    SCALAR_CAST,
    SCATTERED,
    SCATTERING,
    SHORT_ROW,
    SORTED_INDEX,
    SORTED_ROW,
    SORTING,
    TRANSPOSED,
    compiled_scatter_steps,
)
from meshwright.tracing.meter import Meter, OperatorRun

ROWS, WIDTH = 32, 64
SIZE = ROWS * WIDTH


def run(function: Callable[..., Tensor], *given: Tensor) -> OperatorRun:
    """The last operator of a function."""
    found: list[OperatorRun] = []
    with Meter(found.append):
        function(*given)
    return found[-1]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda x: x + torch.empty_like(x), 0.0),
        (lambda x: x * 2, 0.0),
        (lambda x: x + x[0], 1.0),
        (lambda x: x * x[:, :1], 1.0),
        (lambda x: x[:, :1].expand(ROWS, WIDTH) * 2, 1.0),
        (lambda x: x.t().contiguous(), TRANSPOSED),
        (lambda x: x.view(WIDTH, ROWS).t() + x, TRANSPOSED),
        (lambda x: x.float(), CAST),
        (lambda x: x.float().bfloat16(), 0.0),
        (lambda x: x * x[0].float(), BROADCAST_CAST),
        (lambda x: x * torch.empty((), device="meta", dtype=torch.float32), SCALAR_CAST),
        (lambda x: x.masked_fill(x[:, :1] > 0, 0.0), MASKED),
    ],
)
def test_elementwise(function: Callable[..., Tensor], weight: float) -> None:
    assert run(function, empty(ROWS, WIDTH)).steps == pytest.approx(weight * SIZE)


def test_a_transposed_row_is_copied_before_its_norm() -> None:
    x = empty(ROWS, WIDTH)
    plain, copied = (run(lambda x: F.layer_norm(x, (x.shape[-1],)), one).steps for one in (x, empty(WIDTH, ROWS).t()))
    assert copied == pytest.approx(plain + TRANSPOSED * SIZE)


def test_a_batch_norm_of_few_channels_leaves_processors_idle() -> None:
    def steps(channels: int) -> float:
        x, weight = empty(4, channels, 4096 // channels, 8), empty(channels, dtype=torch.float32)
        return run(lambda x: torch.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)[0], x).steps

    assert steps(16) == 4 * steps(64)


def test_depthwise_convolutions_count_their_own_products_only() -> None:
    def backward(x: Tensor) -> OperatorRun:
        found: list[OperatorRun] = []
        weight = empty(WIDTH, 1, 3, 3).requires_grad_()
        with Meter(found.append):
            result = F.conv2d(x.requires_grad_(), weight, padding=1, groups=WIDTH)
            result.backward(torch.empty_like(result))
        assert [one.name for one in found if one.flops] == ["convolution", "convolution_backward"]
        first, second = (one for one in found if one.flops)
        assert first.shape == second.shape == (WIDTH, 2 * 64, 1, 9)
        assert second.flops == 2 * first.flops == 2 * 2 * WIDTH * 2 * 64 * 9
        return second

    usual, last = empty(2, WIDTH, 8, 8), empty(2, WIDTH, 8, 8).to(memory_format=torch.channels_last)
    assert backward(usual).steps > 3 * backward(last).steps > 0


def test_what_is_read_twice_or_only_filled_counts_once() -> None:
    x = empty(ROWS, WIDTH)
    assert run(lambda x: x * x, x).bytes == 2 * SIZE * x.itemsize
    assert run(torch.zeros_like, x).bytes == SIZE * x.itemsize


def test_a_broadcast_operand_counts_as_transposed_if_no_cache_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = empty(4, WIDTH, ROWS).transpose(1, 2)

    def broadcast(x: Tensor) -> Tensor:
        return torch.mul(x, empty(1, ROWS, WIDTH))

    assert SIZE * 2 < CACHE
    assert run(broadcast, x).steps == 4 * SIZE
    monkeypatch.setattr(element_steps, "CACHE", 0)
    assert run(broadcast, x).steps == pytest.approx(TRANSPOSED * 4 * SIZE)


def test_sums_over_short_rows_and_over_few_columns_leave_threads_idle() -> None:
    x = empty(4096, WIDTH)
    assert run(lambda x: x.sum(-1), x).steps == 4096 * SHORT_ROW
    assert run(lambda x: x.sum(0), x).steps == x.numel()
    wide = empty(8, 4096)
    assert run(lambda x: x.sum(0), wide).steps == 8 * COLUMN_ROW
    assert run(lambda x: x.sum(1), empty(4, 8, 64)).steps == 0


def test_the_gradients_of_a_layer_norms_weights_take_a_time_for_each_row() -> None:
    def sums(width: int) -> float:
        x, weight = empty(ROWS, width), empty(width)
        rest = [x, [width], empty(ROWS, 1, dtype=torch.float32), empty(ROWS, 1, dtype=torch.float32), weight, weight]
        steps = [
            run(lambda x, mask=mask: torch.ops.aten.native_layer_norm_backward(x, *rest, mask)[0], x).steps
            for mask in ([True, False, False], [True, True, True])
        ]
        return steps[1] - steps[0]

    assert sums(512) == pytest.approx(sums(1024)) == pytest.approx(ROWS * AFFINE_ROW)
    assert sums(4096) == pytest.approx(2 * sums(2048)) == pytest.approx(ROWS * 4096 * AFFINE)


def test_a_pool_computes_every_element_of_every_window() -> None:
    x = empty(2, 4, 8, 8).requires_grad_()
    found: list[OperatorRun] = []
    with Meter(found.append):
        result = F.avg_pool2d(x, 3, stride=1, padding=1)
        result.backward(torch.empty_like(result))
    steps = {one.name: one.steps for one in found if one.name in POOLS}
    assert steps == {name: pytest.approx(2 * 4 * 64 * 9 * weight) for name, weight in POOLS.items()}


def test_a_pools_window_is_no_larger_than_the_plane() -> None:
    pooled = run(lambda x: F.avg_pool2d(x, 100, ceil_mode=True), empty(2, 4, 8, 8))
    assert pooled.steps == pytest.approx(2 * 4 * 64 * POOLS["avg_pool2d"])


def test_unfolding_counts_the_elements_of_its_columns() -> None:
    x = empty(2, 4, 8, 1)
    assert run(lambda x: F.unfold(x, (3, 1), padding=(1, 0)), x).steps == pytest.approx(2 * 12 * 8 * COLUMNS["im2col"])
    columns = empty(2, 12, 8)
    assert run(lambda x: F.fold(x, (8, 1), (3, 1), padding=(1, 0)), columns).steps == pytest.approx(
        columns.numel() * COLUMNS["col2im"]
    )


def test_a_slices_gradient_is_filled_and_then_copied() -> None:
    x = empty(ROWS, WIDTH).requires_grad_()
    found: list[OperatorRun] = []
    with Meter(found.append):
        x[:, :8].backward(empty(ROWS, 8))
    [backward] = [one for one in found if one.name == "slice_backward"]
    assert backward.steps == pytest.approx(ROWS * 8 + SIZE * 2 * FILLED)


def test_compiled_scatters_and_sums_at_indices_by_the_place_of_what_is_indexed() -> None:
    index = torch.randint(64, (4096,))
    rows, columns = empty(64, WIDTH), empty(WIDTH, 64)

    def eager(base: Tensor, place: list[Tensor | None], values: Tensor, adds: bool) -> float:
        return run(lambda base: torch.ops.aten.index_put.default(base, place, values, adds), base).steps

    copied = eager(rows, [index], empty(4096, WIDTH), False)
    added = eager(rows, [index], empty(4096, WIDTH), True)
    across = eager(columns, [None, index], empty(WIDTH, 4096), True)
    assert added - copied == SORTED_INDEX * 4096
    assert across > 10 * added
    along = compiled_scatter_steps((rows, [index], empty(4096, WIDTH), True))
    assert along == pytest.approx((ATOMIC + COLLIDING_ATOMIC / WIDTH) * 4096 * WIDTH)
    many = compiled_scatter_steps((empty(4 * APART, WIDTH), [index], empty(4096, WIDTH), True))
    assert many == pytest.approx((ATOMIC + COLLIDING_ATOMIC / WIDTH / 4) * 4096 * WIDTH)
    masked = compiled_scatter_steps((rows, index > 0, [index], empty(4096, WIDTH)))
    assert masked == along  # the gradient of an embedding
    across = compiled_scatter_steps((columns, [None, index], empty(WIDTH, 4096), True))
    assert across == ATOMIC_ACROSS * 4096 * WIDTH


def test_an_embeddings_gradient_sorts_its_indices_and_crowded_rows_take_as_long_again() -> None:
    def steps(rows: int, indices: int) -> float:
        place = torch.empty(indices, dtype=torch.int64, device="meta")
        operator = torch.ops.aten.embedding_dense_backward.default
        return run(lambda gradient: operator(gradient, place, rows, -1, False), empty(indices, 1)).steps

    many = CROWDED * 64
    usual = SORTING + (SORTED_ROW + SCATTERING) * many
    assert steps(64, many) == usual and steps(63, many) == usual + SORTED_ROW * many


def test_sums_over_rows_shorter_than_a_warp_share_it() -> None:
    def steps(length: int, dim: int) -> float:
        return run(lambda x: x.sum(dim), empty(4096, 8, length)).steps / (4096 * 8)

    assert steps(64, -1) == SHORT_ROW
    assert steps(8, -1) == SHORT_ROW / 4
    assert steps(2, 1) == 0  # the innermost dim stays, and is shorter than the one that is summed over


def test_interpolation_and_sampling_by_what_each_element_is_made_of() -> None:
    small, large = empty(2, 16, 8, 8).requires_grad_(), empty(2, 16, 32, 32)
    upsample = torch.ops.aten.upsample_bilinear2d
    last = small.detach().to(memory_format=torch.channels_last)
    assert run(lambda x: upsample(x, [32, 32], False), last).steps == RESIZING * large.numel()
    back = torch.ops.aten.upsample_bilinear2d_backward
    usual = run(lambda g: back(g, [32, 32], [2, 16, 8, 8], False), large).steps
    last = run(lambda g: back(g, [32, 32], [2, 16, 8, 8], False), large.to(memory_format=torch.channels_last)).steps
    assert usual == pytest.approx(4 * 4 * COLLIDING * large.numel())
    assert last == pytest.approx(RESIZED_LAST * large.numel())
    grid = empty(2, 32, 32, 2)
    assert run(lambda x: F.grid_sample(x, grid, align_corners=False), empty(2, 16, 8, 8)).steps == (
        SAMPLED["grid_sampler_2d"] * large.numel()
    )


def test_batch_norms_by_the_place_of_their_channels() -> None:
    def steps(x: Tensor) -> float:
        weight = empty(x.shape[1], dtype=torch.float32)
        rest = [x, weight, None, None, weight, weight, True, 1e-5, [True, True, True]]
        return run(lambda x: torch.ops.aten.native_batch_norm_backward(x, *rest)[0], x).steps

    usual, inner = steps(empty(64, 512, 16)), steps(empty(64, 16, 512).transpose(1, 2))
    assert inner == pytest.approx(SCATTERED * usual)
    assert steps(empty(64 * 16, 512)) < usual
    few, near = steps(empty(64, 64, 32)), steps(empty(64, 32, 64).transpose(1, 2))
    assert few < near < SCATTERED * few
    full, unfilled = steps(empty(64, 64, 32, 32)), steps(empty(64, 64, 28, 28))
    assert unfilled / full == pytest.approx(1)  # two rounds of 512 threads each
    assert steps(empty(64, 512, 32, 32)) / steps(empty(64, 512, 28, 28)) == pytest.approx(32**2 / 28**2)


def test_a_stride_does_not_make_a_depthwise_input_gradient_cheaper() -> None:
    def backward(stride: int) -> float:
        found: list[OperatorRun] = []
        with Meter(found.append):
            x, weight = empty(2, WIDTH, 8, 8).requires_grad_(), empty(WIDTH, 1, 3, 3).requires_grad_()
            result = F.conv2d(x, weight, padding=1, stride=stride, groups=WIDTH)
            result.backward(torch.empty_like(result))
        return next(one.steps for one in found if one.name == "convolution_backward")

    assert backward(2) / backward(1) == pytest.approx((1 / 4 + 1) / 2)


def test_groups_of_several_channels_are_computed_by_matrix_units_in_16_bits() -> None:
    def steps(channels: int, dtype: torch.dtype) -> float:
        x = empty(2, 8 * channels, 16, 16, dtype=dtype)
        return run(lambda x: F.conv2d(x, empty(8 * channels, channels, 3, 3, dtype=dtype), groups=8), x).steps

    each = [steps(channels, torch.bfloat16) / channels**2 for channels in (2, 4)]
    assert each[0] / each[1] == pytest.approx(FASTER)
    assert steps(4, torch.float32) == 4 * steps(2, torch.float32)


def test_no_matrix_unit_computes_a_convolution_of_few_channels() -> None:
    def steps(channels: int, dtype: torch.dtype, columns: int = 64) -> list[float]:
        found: list[OperatorRun] = []
        with Meter(found.append):
            x, weight = empty(2, channels, 8, 8, dtype=dtype), empty(columns, channels, 4, 4, dtype=dtype)
            result = F.conv2d(x, weight.requires_grad_())
            result.backward(torch.empty_like(result))
        return [one.steps for one in found if one.kind == "convolution"]

    forward, backward = steps(3, torch.bfloat16)
    assert forward > backward > 0 and steps(3, torch.bfloat16, columns=8)[0] == forward  # as long with fewer columns
    assert steps(8, torch.bfloat16) == steps(4, torch.float32) == [0, 0]
    assert steps(4, torch.bfloat16)[0] > forward


@pytest.mark.parametrize(
    ("dtype", "count", "side", "columns", "kernel", "stride", "measured"),
    [
        (torch.bfloat16, 128, 224, 768, 16, 16, 1.08),
        (torch.bfloat16, 64, 640, 64, 7, 2, 4.99),
        (torch.float32, 2048, 32, 256, 9, 1, 4.54),
    ],
    ids=["patches", "stem", "capsules"],
)
def test_first_layers_of_vision_models_take_as_long_as_on_an_h200(
    dtype: torch.dtype, count: int, side: int, columns: int, kernel: int, stride: int, measured: float
) -> None:
    x, weight = empty(count, 3, side, side, dtype=dtype), empty(columns, 3, kernel, kernel, dtype=dtype)
    steps = run(lambda x: F.conv2d(x, weight, stride=stride, padding=3 if kernel == 7 else 0), x).steps
    assert steps / 4.1e8 == pytest.approx(measured, rel=0.2)
