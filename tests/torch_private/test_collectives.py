from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.assemble.world import fake_world
from meshwright.torch_private.collectives import (
    COLLECTIVES,
    FIRST_BUCKET_BYTES,
    FUNCTIONAL,
    assign_buckets,
    exchange_rows,
    gather_rows,
    group_given_as,
    sum_over,
    sum_row,
)
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.trees import tree_leaves


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.namespaces: list[str] = []
        self.groups: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            self.namespaces.append(func.namespace)
            self.groups += [group for group in map(group_given_as, tree_leaves(args)) if group is not None]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    world = fake_world(2, torch.device("cpu"))
    yield
    world.leave()


@pytest.mark.usefixtures("two_fake_ranks")
def test_the_group_of_a_collective_is_found() -> None:
    with Seen() as seen:
        dist.all_reduce(torch.ones(2))
    assert seen.namespaces == ["c10d"]
    assert [group.group_name for group in seen.groups] == [dist.group.WORLD.group_name]


@pytest.mark.usefixtures("two_fake_ranks")
def test_the_group_of_a_functional_collective_is_found() -> None:
    with Seen() as seen:
        functional = torch.ops._c10d_functional
        functional.wait_tensor(functional.all_gather_into_tensor(torch.ones(2), 2, dist.group.WORLD.group_name))
    assert seen.namespaces[:1] == ["_c10d_functional"]
    assert {group.size() for group in seen.groups} == {2}


def test_other_arguments_are_no_group() -> None:
    assert group_given_as(torch.ones(2)) is group_given_as(3) is None


def test_buckets_fill_up_to_their_limit() -> None:
    tensors = [torch.empty(256, device="meta") for _ in range(5)]  # of 1 KiB
    groups, _ = assign_buckets(tensors, [1024, 2048])
    assert groups == [[0], [1, 2], [3, 4]]
    assert FIRST_BUCKET_BYTES == 1 << 20


@pytest.mark.usefixtures("two_fake_ranks")
def test_functional_collectives_return_new_tensors() -> None:
    x, group = torch.arange(6.0).view(2, 3), dist.group.WORLD.group_name
    with Seen() as seen:
        found = gather_rows(x, 2, group), sum_row(x, 2, group), sum_over(x, group)
    assert [tuple(each.shape) for each in found] == [(2, 2, 3), (3,), (2, 3)]
    assert set(seen.namespaces) == {FUNCTIONAL} and len(seen.groups) == 3
    assert all(each.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for each in found)


@pytest.mark.usefixtures("two_fake_ranks")
def test_rows_are_exchanged_with_uneven_counts() -> None:
    with Seen() as seen:
        found = exchange_rows(torch.ones(5, 3), [1, 4], [2, 0], dist.group.WORLD.group_name)
    assert tuple(found.shape) == (2, 3)
    assert seen.namespaces[:1] == [FUNCTIONAL] and seen.groups[0].size() == 2
