"""What ranks hold as boxes of the whole: together they cover it, each number once per copy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from meshwright.assemble.world import fake_world
from meshwright.checkpoint.parts import HeldParts, Part, chunk, held_parts
from meshwright.strategies.cuts import Cut

DATA, TENSOR = 0, 1


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Every number is another."""
    return torch.arange(1.0, prod(shape) + 1).view(shape)


@contextmanager
def rank_of(sizes: tuple[int, ...], rank: int) -> Iterator[DeviceMesh]:
    """A mesh as one of its ranks sees it; the others are made up.

    DTensor remembers results by mesh, and takes those of the same names and sizes for one: each rank's has its own.
    """
    world = fake_world(prod(sizes), torch.device("cpu"), rank=rank)
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"{dim} of {rank}" for dim in range(len(sizes))))
    finally:
        world.leave()


def on_all_ranks(sizes: tuple[int, ...], look: Callable[[DeviceMesh], HeldParts]) -> list[HeldParts]:
    found = []
    for rank in range(prod(sizes)):
        with rank_of(sizes, rank) as mesh:
            found.append(look(mesh))
    return found


def assert_covered(whole: torch.Tensor, ranks: list[HeldParts], copies: int) -> None:
    """Every number of the whole is in as many boxes as there are copies, with its own value."""
    counts = torch.zeros(whole.shape, dtype=torch.int64)
    for laid in ranks:
        assert laid.shape == tuple(whole.shape)
        assert laid.dtype == whole.dtype
        for part in laid.parts:
            where = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.tensor.shape, strict=True))
            assert torch.equal(whole[where], part.tensor), f"{part.offsets}: {part.tensor}"
            counts[where] += 1
    assert counts.unique().tolist() in ([copies], [])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13, 31])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_chunks_are_those_of_torch(length: int, count: int) -> None:
    parts = numbered((length,)).chunk(count)
    for at in range(count):
        start, size = chunk(length, count, at)
        expected = parts[at].tolist() if at < len(parts) else []
        assert numbered((length,))[start : start + size].tolist() == expected


@pytest.mark.parametrize("shape", [(8, 3), (13, 3), (3, 4), (2,), (1,), (31, 2, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_the_first_dim(shape: tuple[int, ...], ranks: int) -> None:
    """Also where the last ranks have less, or nothing."""
    whole = numbered(shape)
    found = on_all_ranks((ranks,), lambda mesh: held_parts(shard(whole, mesh, [Shard(0)])))
    assert_covered(whole, found, copies=1)
    assert all(part.tensor.numel() for laid in found for part in laid.parts)


PLACEMENTS: list[tuple[list[Placement], int]] = [
    ([Replicate(), Replicate()], 6),
    ([Replicate(), Shard(0)], 2),
    ([Shard(0), Replicate()], 3),
    ([Shard(0), Shard(1)], 1),
    ([Shard(1), Shard(0)], 1),
    ([Shard(0), Shard(0)], 1),
    ([Shard(1), Shard(1)], 1),
]


@pytest.mark.parametrize(("placements", "copies"), PLACEMENTS)
@pytest.mark.parametrize("shape", [(6, 6), (7, 5), (2, 13), (1, 1)])
def test_meshes_of_two_dims(placements: list[Placement], copies: int, shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    found = on_all_ranks((2, 3), lambda mesh: held_parts(shard(whole, mesh, placements)))
    assert_covered(whole, found, copies)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_without_dims_or_numbers(shape: tuple[int, ...]) -> None:
    """All ranks have it: whoever writes it, it is not lost."""
    for laid in (
        held_parts(numbered(shape)),
        *on_all_ranks((2,), lambda mesh: held_parts(shard(numbered(shape), mesh, [Replicate()]))),
    ):
        (part,) = laid.parts
        assert (laid.shape, part.offsets, tuple(part.tensor.shape)) == (shape, (0,) * len(shape), shape)


@pytest.mark.parametrize(("dim", "pieces"), [*product([0, 1], [1, 2, 3])])
def test_cuts(dim: int, pieces: int) -> None:
    whole = numbered((12, 24))

    def look(mesh: DeviceMesh) -> HeldParts:
        cut = Cut(dim=dim, mesh=mesh, pieces=pieces)
        return held_parts(cut.take(whole), cut)

    found = on_all_ranks((2,), look)
    assert_covered(whole, found, copies=1)
    assert all(len(laid.parts) == pieces for laid in found)


@pytest.mark.parametrize(("dim", "pieces", "over"), [*product([0, 1], [1, 2, 3], [0, 1])])
def test_cuts_in_shards(dim: int, pieces: int, over: int) -> None:
    """Tensor parallelism under FSDP or ZeRO: shards of three data ranks go across the borders of pieces."""
    whole = numbered((12, 24))

    def look(mesh: DeviceMesh) -> HeldParts:
        cut = Cut(dim=dim, mesh=axis(mesh, TENSOR), pieces=pieces)
        return held_parts(shard(cut.take(whole), axis(mesh, DATA), [Shard(over)]), cut)

    assert_covered(whole, on_all_ranks((3, 2), look), copies=1)


@pytest.mark.parametrize("data_ranks", [4, 5])
def test_a_cut_of_which_the_last_data_rank_has_nothing(data_ranks: int) -> None:
    whole = numbered((6, 2))

    def look(mesh: DeviceMesh) -> HeldParts:
        cut = Cut(dim=0, mesh=axis(mesh, TENSOR), pieces=3)
        return held_parts(shard(cut.take(whole), axis(mesh, DATA), [Shard(0)]), cut)

    found = on_all_ranks((data_ranks, 2), look)
    assert_covered(whole, found, copies=1)
    assert found[-1].parts == () and found[-1].shape == (6, 2)


def test_what_a_model_axis_leaves_whole_is_held_by_all_of_it() -> None:
    whole = numbered((5, 2))
    found = on_all_ranks((3, 2), lambda mesh: held_parts(shard(whole, axis(mesh, DATA), [Shard(0)])))
    assert_covered(whole, found, copies=2)


def test_boxes_are_views() -> None:
    """What is written into them is loaded."""
    with rank_of((2, 2), 3) as mesh:
        cut = Cut(dim=1, mesh=axis(mesh, TENSOR), pieces=2)
        held = shard(cut.take(numbered((4, 8))), axis(mesh, DATA), [Shard(0)])
        for part in held_parts(held, cut).parts:
            part.tensor.fill_(-1.0)
        assert held.to_local().unique().tolist() == [-1.0]
    parameter = torch.nn.Parameter(numbered((3,)))
    held_parts(parameter).parts[0].tensor.zero_()
    assert parameter.tolist() == [0.0, 0.0, 0.0]


def test_two_copies_on_one_rank() -> None:
    """As two stages of a pipeline have of a tied weight."""
    both = held_parts(numbered((2,))) + held_parts(numbered((2,)))
    assert [part.offsets for part in both.parts] == [(0,), (0,)]
    assert both.shape == (2,) and isinstance(both.parts[0], Part)


def axis(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[dim]]


def shard(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    """As PyTorch itself divides it; every rank has the whole, so nothing is sent."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
