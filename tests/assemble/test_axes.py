"""Where ranks lie on the axes, and with whom they share each of them."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist

from meshwright.assemble.axes import Axes, lay_axes
from meshwright.assemble.world import World, fake_world
from meshwright.facts.strategy import Strategy

CPU = torch.device("cpu")
Make = Callable[[int, int], World]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 2), (3, 2, 4), (2, 4, 1)])
def test_coordinates(sizes: tuple[int, int, int]) -> None:
    """Tensor ranks are neighbours, pipeline ranks are farthest apart."""
    for rank, place in enumerate(product(*map(range, sizes))):
        axes = Axes(sizes=dict(zip(("pipeline", "data", "tensor"), sizes, strict=True)), rank=rank)
        assert tuple(map(axes.place_on, axes.sizes)) == place


@pytest.fixture
def make() -> Iterator[Make]:
    """Worlds of which one exists at a time."""
    made: list[World] = []

    def world(ranks: int, rank: int) -> World:
        while made:
            made.pop().leave()
        made.append(fake_world(ranks, CPU, rank=rank))
        return made[-1]

    yield world
    while made:
        made.pop().leave()


def members(strategy: str, world: World) -> dict[str, list[int] | None]:
    """The ranks of each axis that this rank lies on."""
    axes = lay_axes(Strategy.parse(strategy).resolve(world.ranks), world)
    tensor = next((mesh for _, mesh in axes.inner), None)
    meshes = {"pipeline": axes.stages, "data": axes.data, "tensor": tensor}
    return {name: mesh.mesh.flatten().tolist() if mesh is not None else None for name, mesh in meshes.items()}


@pytest.mark.parametrize("rank", range(8))
def test_all_axes(make: Make, rank: int) -> None:
    pipeline, data, tensor = rank // 4, rank // 2 % 2, rank % 2
    assert members("pp=2:1f1b,fsdp,tp=2", make(8, rank)) == {
        "pipeline": [2 * data + tensor, 4 + 2 * data + tensor],
        "data": [4 * pipeline + tensor, 4 * pipeline + 2 + tensor],
        "tensor": [4 * pipeline + 2 * data, 4 * pipeline + 2 * data + 1],
    }


@pytest.mark.parametrize(
    ("strategy", "pipeline", "data", "tensor"),
    [
        ("pp=8:1f1b", list(range(8)), None, None),
        ("layers=8", list(range(8)), None, None),
        ("fsdp", None, list(range(8)), None),
        ("op=8", None, None, list(range(8))),
        ("pp=2:zb,ddp", [1, 5], [4, 5, 6, 7], None),
        ("layers=4,zero1", [1, 3, 5, 7], [4, 5], None),
        ("pp=2:1f1b,op=4", [1, 5], None, [4, 5, 6, 7]),
        ("ddp,op=2", None, [1, 3, 5, 7], [4, 5]),
        ("pp=2:1f1b,hsdp=2x2", [1, 5], [4, 5, 6, 7], None),
    ],
)
def test_rank_five_of_eight(
    make: Make, strategy: str, pipeline: list[int] | None, data: list[int] | None, tensor: list[int] | None
) -> None:
    assert members(strategy, make(8, 5)) == {"pipeline": pipeline, "data": data, "tensor": tensor}


def test_a_hybrid_data_axis_has_two_dims(make: Make) -> None:
    world = make(8, 5)
    mesh = lay_axes(Strategy.parse("pp=2:1f1b,hsdp=2x2").resolve(8), world).data
    assert mesh is not None
    assert mesh.mesh.tolist() == [[4, 5], [6, 7]]
    assert mesh.mesh_dim_names == ("replicate", "shard")


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("pp=2:1f1b,fsdp,tp=2", [5, 7]),
        ("layers=2,hsdp=2x2", [4, 5, 6, 7]),
        ("pp=8:1f1b", None),
        ("ddp", list(range(8))),
    ],
)
def test_who_shares_a_batch(make: Make, strategy: str, ranks: list[int] | None) -> None:
    world = make(8, 5)
    group = lay_axes(Strategy.parse(strategy).resolve(8), world).batch_group(world)
    assert (dist.get_process_group_ranks(group) if group else None) == ranks


def test_some_places_of_the_pipeline(make: Make) -> None:
    """As for a parameter that the first and the last stage hold."""
    axes = lay_axes(Strategy.parse("pp=4:1f1b,ddp").resolve(8), make(8, 7))
    group = axes.stage_group({0, 3})
    assert group is not None
    assert dist.get_process_group_ranks(group) == [1, 7]
    assert axes.stage_group({0, 1}) is None


def test_one_process_has_no_axes() -> None:
    axes = lay_axes(Strategy.parse("single"), World(device=CPU))
    assert (axes.mesh, axes.data, axes.stages, axes.inner) == (None, None, None, ())
    assert axes.batch_group(World(device=CPU)) is None


def test_the_data_axis_on_the_host_has_the_same_ranks() -> None:
    world = fake_world(4, torch.device("cpu"), rank=2)
    try:
        axes = lay_axes(Strategy.parse("pp=2:1f1b,fsdp").resolve(4), world)
        host = axes.data_on_host()
        assert host is not None and axes.data is not None
        assert host.mesh.tolist() == axes.data.mesh.tolist() == [2, 3]
    finally:
        world.leave()
