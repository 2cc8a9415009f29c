from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.assemble.world import fake_world
from meshwright.strategies.tensor import replay


@pytest.fixture
def tensor_mesh() -> Iterator[DeviceMesh]:
    """A tensor axis of two ranks in a fake world, with recorded programs."""
    world = fake_world(2, torch.device("cpu"))
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    replay.recording(True)
    world.leave()
