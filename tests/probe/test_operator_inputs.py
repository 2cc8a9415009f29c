"""Integers among an operator's made-up inputs are valid, and spread over what they index."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.probe.operator_inputs import make_runnable
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.tracing.operator_calls import CallCollector, FunctionCalls, OperatorCall

CPU = torch.device("cpu")


def given_to(name: str, function: Callable[[], Any]) -> tuple[list[torch.Tensor], Any]:
    """The tensors that one operator of a function gets when it is run by itself, and what it returns."""
    with FakeTensorMode(), FunctionCalls() as calls:
        function()
    (call,) = (call for call in calls.collector.calls.values() if call.run.name == name)
    return arguments(call)


def arguments(call: OperatorCall) -> tuple[list[torch.Tensor], Any]:
    seen: list[torch.Tensor] = []
    operator = call.operator

    def spy(*args: Any, **kwargs: Any) -> Any:
        flat = [leaf for arg in args for leaf in (arg if isinstance(arg, list) else [arg])]
        seen.extend(leaf for leaf in [*flat, *kwargs.values()] if isinstance(leaf, torch.Tensor))
        return operator(*args, **kwargs)

    spy._schema = operator._schema  # type: ignore[attr-defined]
    call.operator = spy
    try:
        return seen, make_runnable(call, CPU, {})()
    finally:
        call.operator = operator


def integers(size: Any) -> torch.Tensor:
    return torch.empty(size, dtype=torch.long)


def test_tokens_are_spread_over_the_vocabulary() -> None:
    (_, tokens), _ = given_to("embedding", lambda: F.embedding(integers((64, 64)), torch.empty(1000, 2)))
    assert 0 <= tokens.min() < 100 and 900 < tokens.max() < 1000
    assert len(tokens.unique()) > 900


def test_labels_are_spread_over_the_classes() -> None:
    (_, labels), _ = given_to("nll_loss_forward", lambda: F.nll_loss(torch.empty(4096, 50), integers(4096)))
    assert len(labels.unique()) == 50


@pytest.mark.parametrize(("shape", "places"), [((2, 3, 16, 16), (64, 64)), ((2, 3, 8, 8, 8), (5, 100, 2))])
def test_places_in_a_map_run_through_it_line_by_line(shape: tuple[int, ...], places: tuple[int, ...]) -> None:
    dims = len(shape) - 2

    def function() -> torch.Tensor:
        return F.grid_sample(torch.empty(shape), torch.empty(2, *places, dims), align_corners=False)

    (_, grid), _ = given_to(f"grid_sampler_{dims}d", function)
    assert grid.min() == -1 and 0.5 < grid.max() <= 1
    order = grid[0].flatten(0, -2)
    steps = (order[1:] - order[:-1]).abs().amax(dim=-1)
    assert steps.median() < 0.5 and torch.equal(grid[0], grid[1])
    assert len(order.unique(dim=0)) > 0.9 * len(order)


@pytest.mark.parametrize(("pool", "shape"), [(F.max_pool2d, (2, 3, 8, 12)), (F.max_pool3d, (2, 3, 4, 8, 12))])
def test_each_window_of_a_pooled_plane_has_its_own_maximum(pool: Callable[..., Any], shape: tuple[int, ...]) -> None:
    def function() -> None:
        x = torch.empty(shape, requires_grad=True)
        pool(x, 2).sum().backward()

    given, _ = given_to(f"{pool.__name__}_with_indices_backward", function)
    index = given[-1][0, 0]
    expected = pool(-torch.arange(float(torch.Size(shape[2:]).numel())).view(1, 1, *shape[2:]), 2, return_indices=True)
    assert torch.equal(index, expected[1][0, 0])


def test_each_index_is_within_its_own_dim() -> None:
    def function() -> torch.Tensor:
        return torch.empty(500, 3, 40)[integers(4096), :, integers(4096)]

    (_, rows, columns), _ = given_to("index", function)
    assert len(rows.unique()) > 450 and len(columns.unique()) == 40


def test_gathered_indices_are_runs_of_neighbours() -> None:
    (_, index), _ = given_to("gather", lambda: torch.empty(6, 8, 100).gather(-1, integers((1, 8, 60)).expand(6, 8, 60)))
    assert index.stride()[0] == 0 and index.max() < 100
    assert bool(((index[..., 1:] - index[..., :-1]) % 100 == 1).all())
    assert len(index[..., 0].unique()) > 1
    (_, labels), _ = given_to("gather", lambda: torch.empty(4096, 50).gather(1, integers((4096, 1))))
    assert len(labels.unique()) == 50


@pytest.mark.parametrize(
    ("left", "right", "divided"),
    [((64, 16), (5, 16, 8), 64), ((16, 64), (64, 8), 64), ((5, 8, 16), (16, 64), 64)],
    ids=["rows", "inner", "columns"],
)
def test_groups_of_a_product_are_equally_large(left: Any, right: Any, divided: int) -> None:
    collector, grouped = CallCollector(), torch.ops.aten._grouped_mm.default
    with FakeTensorMode():
        a, b = torch.empty(left, dtype=torch.bfloat16), torch.empty(right, dtype=torch.bfloat16)
        collector.note(grouped, (a, b), {"offs": torch.empty(5, dtype=torch.int32)}, a, "forward")
    (call,) = collector.calls.values()
    (_, _, offsets), _ = arguments(call)
    assert offsets.tolist() == [divided * group // 5 for group in range(1, 6)]


def test_bags_begin_at_equal_distances() -> None:
    def function() -> torch.Tensor:
        return F.embedding_bag(integers(60), torch.empty(100, 4), integers(6), mode="sum")

    (_, indices, offsets, *_), found = given_to("_embedding_bag_forward_only", function)
    assert offsets.tolist() == [0, 10, 20, 30, 40, 50] and indices.max() > 50
    assert found[0].shape == (6, 4)
