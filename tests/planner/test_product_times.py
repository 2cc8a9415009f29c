"""The catalogue's times of products and attention with awkward shapes, held against those measured on an H200."""

from dataclasses import replace

import pytest

from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import Kernel, Size
from meshwright.facts.kernel_table import shipped_table
from meshwright.planner import kernels
from meshwright.planner.measured_kernels import KernelPrices

H200 = hardware_of(Cluster(devices_per_node=8, device="H200-141GB"))


def product(batch: int, m: int, n: int, k: int) -> Kernel:
    moved = 2.0 * batch * (m * k + k * n + m * n)
    shape = tuple(map(Size, (batch, m, n, k)))
    flops = Size(2.0 * batch * m * n * k)
    return Kernel(name="bmm", kind="matmul", dtype="bf16", flops=flops, bytes=Size(moved), shape=shape)


def ms(kernel: Kernel) -> float:
    return kernels.seconds(kernel, 1, 1, H200) * 1e3


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        ((1, 8192, 50265, 1024), 8.7231),
        ((1, 8192, 1024, 50265), 5.9921),
        ((1, 50265, 1024, 8192), 5.6783),
        ((1536, 197, 197, 64), 0.2067),
        ((1536, 197, 64, 197), 0.1816),
        ((1024, 510, 510, 64), 0.555),
        ((640, 196, 49, 64), 0.0377),
        ((262144, 64, 9, 1), 1.2141),
    ],
)
def test_products_with_unaligned_sides(shape: tuple[int, int, int, int], measured: float) -> None:
    assert ms(product(*shape)) == pytest.approx(measured, rel=0.15)


def test_a_product_with_a_vector_is_limited_by_memory() -> None:
    for shape in ((4096, 64, 1, 9), (4096, 1, 64, 9)):
        vector = product(*shape)
        assert ms(vector) == pytest.approx((kernels.LEAST + kernels.moving(vector.bytes.fixed, H200)) * 1e3)


def test_unaligned_products_do_not_learn_from_aligned_ones() -> None:
    table = shipped_table("H200-141GB")
    assert table is not None
    prices = KernelPrices(table, H200)
    for shape in ((1536, 197, 197, 64), (1024, 510, 510, 64)):
        assert prices.seconds(product(*shape), 1, 1).total * 1e3 == pytest.approx(ms(product(*shape)), rel=0.1)


def recurrent(steps: int, rows: int, width: int, passes: int) -> Kernel:
    matrix = 4 * width * width
    return Kernel(
        name="_cudnn_rnn",
        kind="recurrent",
        dtype="bf16",
        flops=Size(2.0 * passes * steps * rows * 2 * matrix),
        bytes=Size(2.0 * steps * matrix),
        shape=tuple(map(Size, (steps, rows, 4 * width, width))),
    )


def test_time_steps_of_a_recurrent_layer_wait_for_each_other() -> None:
    few, many = (ms(recurrent(512, rows, 256, 1)) for rows in (8, 16))
    assert 512 * kernels.TIME_STEP * 1e3 < few < many < 1.1 * few  # the rows hardly count
    # An LSTM of 4 layers of 1024 over 128 tokens: with backward, two of them take some 34 ms of a measured step.
    passes = [ms(recurrent(4 * 128, 128, 1024, count)) for count in (1, 2)]
    assert 2 * sum(passes) == pytest.approx(34.5, rel=0.15)


def attention(heads: int, tokens: int, width: int, *, causal: bool = True, backward: bool = True) -> Kernel:
    products = 5 if backward else 2
    flops = 2.0 * products * heads * tokens**2 * width / (1 + causal)
    shape = tuple(map(Size, (heads, tokens, tokens, width)))
    name = "_scaled_dot_product_flash_attention" + "_backward" * backward
    return Kernel(name=name, kind="attention", dtype="bf16", flops=Size(flops), bytes=Size(0.0), shape=shape)


def test_the_last_blocks_of_causal_attention_run_alone() -> None:
    # 4 heads of a Llama under tp=4, and all 16 of them.
    assert ms(attention(8 * 4, 2048, 128)) == pytest.approx(0.2723, rel=0.15)
    assert ms(attention(8 * 16, 2048, 128)) == pytest.approx(0.9045, rel=0.15)
    ways = {causal: ms(attention(32, 2048, 128, causal=causal)) for causal in (True, False)}
    assert ways[False] < 1.7 * ways[True]  # of twice the products


def test_a_gradient_of_attention_sums_over_queries_too() -> None:
    def each(queries: int, backward: bool) -> float:
        """Milliseconds for a query."""
        kernel = attention(256, 2048, 64, causal=False, backward=backward)
        flops, heads, keys = kernel.flops.fixed * queries / 2048, kernel.shape[0], kernel.shape[2]
        shape = (heads, Size(queries), keys, Size(64))
        return ms(replace(kernel, flops=Size(flops), shape=shape)) / queries

    assert each(128, True) > 2 * each(2048, True)
    assert each(128, False) < 1.5 * each(2048, False)
