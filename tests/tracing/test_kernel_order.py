"""The order of kernels that needs least memory."""

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.tracing.fusion import Program, fuse
from meshwright.tracing.kernel_order import (
    Dependencies,
    breadth_first,
    depth_first,
    greedy,
    order_kernels,
    peak_of,
)
from meshwright.tracing.nodes import Key

LAYERS, SIDE = 24, 64


def key(name: str) -> Key:
    return fx.Graph().placeholder(name), 0


def signs_at_the_end(layers: int) -> Dependencies:
    """Each layer makes a large value for the next layer and for its signs, which are small and come last."""
    large, small = ([key(f"{word}{layer}") for layer in range(layers)] for word in ("large", "small"))
    reads = [[large[layer - 1]] if layer else [] for layer in range(layers)]
    return Dependencies(
        reads=[*reads, *([value] for value in large)],
        writes=[[value] for value in large + small],
        sizes=dict.fromkeys(large, 16) | dict.fromkeys(small, 1),
        kept=frozenset(small),
    )


def test_what_frees_memory_runs_early() -> None:
    given = signs_at_the_end(5)
    assert peak_of(given, list(given.kernels)) == 5 * 16 + 1
    assert peak_of(given, order_kernels(given)) == 2 * 16 + 4


def test_all_orders_run_every_kernel_after_its_sources() -> None:
    given = signs_at_the_end(5)
    for sort in (greedy, breadth_first, depth_first):
        order = sort(given)
        assert sorted(order) == list(given.kernels)
        assert all(order.index(source) < order.index(kernel) for kernel in order for source in given.before[kernel])


def test_the_own_order_is_kept_if_none_is_better() -> None:
    values = [key(f"value{place}") for place in range(3)]
    given = Dependencies(
        reads=[[], [], values[:2]],
        writes=[[value] for value in values],
        sizes=dict.fromkeys(values, 4),
        kept=frozenset(values[2:]),
    )
    assert order_kernels(given) == [0, 1, 2]


def signs(x: Tensor, weight: Tensor) -> list[Tensor]:
    """A chain of products. The signs of all results are computed at the end, as a minimal cut appends them."""
    results = []
    for _ in range(LAYERS):
        results.append(x @ weight)
        x = results[-1].relu() @ weight
    return [x, *(result <= 0 for result in results)]


def held(program: Program) -> int:
    """The most bytes at a time."""
    live = peak = 0
    sizes = {key: buffer.bytes for key, buffer in program.buffers.items()}
    for kernel in program.kernels:
        live += sum(sizes[key] for key in kernel.writes if key not in kernel.takes)
        peak = max(peak, live)
        taken = set(kernel.takes.values())
        live -= sum(sizes[key] for key in kernel.frees if key not in taken and key[0].op != "placeholder")
    return peak


def test_forward_holds_no_value_for_signs_that_come_last() -> None:
    with FakeTensorMode():
        graph = make_fx(signs)(torch.empty(SIDE, SIDE), torch.empty(SIDE, SIDE)).graph
    value, kept = 4 * SIDE * SIDE, LAYERS * SIDE * SIDE
    assert held(fuse(graph)) <= kept + 4 * value
    assert held(fuse(graph, reorders=False)) > kept + 4 * value
