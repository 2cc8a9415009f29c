from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.assemble.world import fake_world
from meshwright.torch_private.dtensor import (
    forget_layouts,
    layout_of,
    local_tensor,
    make_dtensor,
    set_local_tensor,
    shape_search_wrapped,
    spec_of,
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    world = fake_world(2, torch.device("cpu"))
    yield init_device_mesh("cpu", (2,))
    world.leave()
    forget_layouts()


def test_the_local_tensor_is_read_and_replaced(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    assert torch.equal(local_tensor(tensor), torch.ones(2, 3))
    set_local_tensor(tensor, torch.zeros(2, 3))
    assert torch.equal(tensor.to_local(), torch.zeros(2, 3))


def test_the_search_for_a_shape_is_seen_until_it_is_remembered(mesh: DeviceMesh) -> None:
    searches = []

    def wrap(search: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (searches.append(1), search(*args, **kwargs))[1]

    tensor = DTensor.from_local(torch.ones(2, 7), mesh, [Shard(0)])
    forget_layouts()
    with shape_search_wrapped(wrap):
        tensor.sin()
        assert len(searches) == 1
        tensor.sin()
        assert len(searches) == 1
        forget_layouts()
        tensor.sin()
        assert len(searches) == 2


def test_a_dtensor_is_made_from_a_known_layout(mesh: DeviceMesh) -> None:
    first = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    made = make_dtensor(torch.zeros(2, 3), spec_of(first))
    assert made.shape == first.shape and made.placements == first.placements and made.device_mesh == mesh
    assert local_tensor(made).tolist() == [[0, 0, 0]] * 2 and spec_of(made) is not spec_of(first)


def test_a_layout_is_what_two_equal_dtensors_share(mesh: DeviceMesh) -> None:
    one = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    where, placements, shown = layout_of(one)
    assert where is mesh and placements == (Shard(0),) and shown.shape == (4, 3) and shown.dtype == torch.float32
    assert all(
        a is b for a, b in zip(layout_of(one), layout_of(make_dtensor(torch.zeros(2, 3), spec_of(one))), strict=True)
    )
