"""How a parameter is cut over a model axis: parts come back as the whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.assemble.world import fake_world
from meshwright.strategies import parts as rank_parts
from meshwright.strategies.cuts import Cut, narrow

RANKS = 3


class Place:
    """Stands for the mesh of one axis, seen by one of its ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def size(self) -> int:
        return RANKS

    def get_local_rank(self) -> int:
        return self.rank

    def get_group(self) -> None:
        return None


def cut(rank: int, dim: int, pieces: int = 1) -> Cut:
    place: Any = Place(rank)
    return Cut(dim=dim, mesh=place, pieces=pieces)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """What all ranks would send; the gather of `join` brings it."""
    parts: list[torch.Tensor] = []

    monkeypatch.setattr(rank_parts, "gather_rows", lambda own, ranks, group: torch.stack(parts))
    yield parts


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("pieces", [1, 2])
def test_parts_are_the_whole(gathered: list[torch.Tensor], dim: int, pieces: int) -> None:
    whole = torch.arange(12 * 6.0).view(12, 6)
    gathered += [cut(rank, dim, pieces).take(whole) for rank in range(RANKS)]
    for rank, part in enumerate(gathered):
        own = cut(rank, dim, pieces)
        assert tuple(part.shape) == own.local_shape((12, 6))
        assert torch.equal(own.join(part), whole)
    assert torch.equal(torch.cat([p.reshape(-1) for p in gathered]).sort().values, whole.reshape(-1))


def test_each_piece_is_divided_by_itself() -> None:
    """Query, key and value in one: every rank gets its heads of each."""
    whole = torch.tensor([0, 0, 1, 1, 2, 2, 10, 10, 11, 11, 12, 12])
    assert cut(1, 0, pieces=2).take(whole).tolist() == [1, 1, 11, 11]
    assert cut(1, 0).take(whole).tolist() == [2, 2, 10, 10]


def test_a_part_has_memory_of_its_own() -> None:
    whole = torch.zeros(6, 100)
    part = cut(0, 0).take(whole)
    assert part.untyped_storage().nbytes() == part.numel() * 4
    part.fill_(1.0)
    assert whole.sum() == 0


def test_in_a_world() -> None:
    world = fake_world(4, torch.device("cpu"), rank=2)
    try:
        from torch.distributed.device_mesh import init_device_mesh

        own = Cut(dim=0, mesh=init_device_mesh("cpu", (4,)))
        assert own.ranks == 4
        assert own.take(torch.arange(8)).tolist() == [4, 5]
        assert own.join(torch.zeros(2, 3)).shape == (8, 3)
    finally:
        world.leave()


def test_narrowed_parameters_stay_tied() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)
    second.weight = first.weight
    first.weight.requires_grad_(False)
    narrowed: dict[int, nn.Parameter] = {}
    whole = first.weight
    for module in (first, second):
        narrow(module, "weight", cut(0, 1), narrowed)
    assert first.weight is second.weight is not whole
    assert first.weight.shape == (3, 2)
    assert first.weight.is_meta and not first.weight.requires_grad
