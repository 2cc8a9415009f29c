"""Each schedule is the one that PyTorch's class of that name runs: the same order on every rank, the same demands."""

import pytest

from meshwright.schedules import Slot, least_micro_batches, make, micro_batches_near, refuse
from schedules.torch_orders import CLASSES, torch_accepts, torch_order, torch_placement

RANKS = (1, 2, 3, 4, 8)
LOOPED = ("interleaved", "zb")


def printed(slot: Slot) -> str:
    """As PyTorch prints a step."""
    text = ";".join(map(str, slot))
    return f"({text})OVERLAP_F_B" if len(slot) > 1 else text


def order(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> list[list[str]]:
    schedule = make(name, ranks, micro_batches, virtual=virtual)
    return [[printed(slot) for slot in row if slot] for row in schedule.rows]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CLASSES)
def test_orders(name: str, ranks: int) -> None:
    sizes = {micro_batches_near(name, ranks, wanted) for wanted in range(1, 4 * ranks + 2)}
    wrong = [size for size in sizes if order(name, ranks, size) != torch_order(name, ranks, size)]
    assert wrong == []


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LOOPED)
def test_orders_with_other_numbers_of_stages(name: str, ranks: int, virtual: int) -> None:
    for size in (ranks - 1, ranks, 2 * ranks, 3 * ranks):
        assert order(name, ranks, size, virtual) == torch_order(name, ranks, size, virtual)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CLASSES)
def test_demands(name: str, ranks: int) -> None:
    sizes = range(1, 4 * ranks + 2)
    accepted = [size for size in sizes if torch_accepts(name, ranks, size)]
    assert [size for size in sizes if refuse(name, ranks, size) is None] == accepted
    assert least_micro_batches(name, ranks) == accepted[0]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["interleaved", "zb", "zbv", "dualpipev"])
def test_placement(name: str, ranks: int) -> None:
    schedule = make(name, ranks, 2 * ranks)
    ours = {stage: schedule.rank_of(stage) for stage in range(schedule.stages)}
    assert ours == torch_placement(name, ranks, 2 * ranks)
