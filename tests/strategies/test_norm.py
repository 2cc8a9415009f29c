"""The norm of all gradients, against float64."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.assemble.world import fake_world
from meshwright.strategies.norm import global_norm, local, scale_
from minimal import CPU


def exact(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors]).norm())


@pytest.mark.parametrize("shapes", [[(3,)], [(2, 3), (5,), ()], [(300, 1000), (7,)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    norm = global_norm(tensors)
    assert norm.shape == ()
    assert norm.dtype == torch.float64  # whatever the gradients are: ranks add their squares up
    assert float(norm) == pytest.approx(exact(tensors), rel=5e-6)


def test_many_small_numbers_are_not_lost() -> None:
    tensors = [torch.full((1_000_000,), 1e-3)]
    assert float(global_norm(tensors)) == pytest.approx(exact(tensors), rel=1e-5)


def test_not_contiguous() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert float(global_norm([tensor])) == pytest.approx(exact([tensor]))


def test_nothing() -> None:
    assert float(global_norm([])) == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_overflow_is_seen(value: float) -> None:
    assert not torch.isfinite(global_norm([torch.ones(3), torch.tensor([1.0, value])]))


def test_shards_and_whole_tensors_together() -> None:
    """In a fake world a sum over ranks brings nothing, so the norm is that of what this rank holds."""
    world = fake_world(2, CPU)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        own = [torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([12.0])]
        placements = [[Shard(0)], [Replicate()]]
        gradients = [DTensor.from_local(t, mesh, p, run_check=False) for t, p in zip(own, placements, strict=False)]
        assert float(global_norm([*gradients, own[2]])) == pytest.approx(13.0)
        scale_([*gradients, own[2]], 0.5)
        assert [local(g).item() for g in [*gradients, own[2]]] == [1.5, 2.0, 6.0]
    finally:
        world.leave()


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_scale(factor: torch.Tensor | float) -> None:
    tensors = [torch.ones(2, 2), torch.tensor(4.0)]
    scale_(tensors, factor)
    assert [t.sum().item() for t in tensors] == [2.0, 2.0]
    scale_([], factor)
