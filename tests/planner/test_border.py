"""The largest size that fits, found with few measurements."""

import pytest

from meshwright.planner.border import MOST, largest_that, settle


@pytest.mark.parametrize("border", [0, 1, 2, 7, 8, 9, 1000, MOST - 1, MOST])
def test_bisection_finds_the_border(border: int) -> None:
    assert largest_that(lambda size: size <= border) == border


def test_a_border_beyond_the_largest_size_is_the_largest_size() -> None:
    assert largest_that(lambda size: True) == MOST
    assert settle(lambda size: -1.0, guess=MOST, each=1.0) == (MOST, MOST + 1)


@pytest.mark.parametrize("border", [0, 1, 5, 97, 98, 99, 900])
@pytest.mark.parametrize("guess", [0, 1, 60, 98, 145, 9000])
@pytest.mark.parametrize("each", [0.0, 0.5e9, 1e9, 3e9])
def test_measuring_settles_on_neighbours(border: int, guess: int, each: float) -> None:
    asked: list[int] = []

    def excess(size: int) -> float:
        asked.append(size)
        return (size - border) * 1e9 - 0.5e9

    assert settle(excess, guess, each) == (border, border + 1)
    assert border in asked or border == 0
    assert border + 1 in asked
    assert len(asked) == len(set(asked))


def test_few_measurements_are_enough() -> None:
    """The account is off by half, and so is its growth."""
    asked: list[int] = []

    def excess(size: int) -> float:
        asked.append(size)
        return 0.11e9 * size - 10.8e9

    assert settle(excess, guess=145, each=0.07e9) == (98, 99)
    assert len(asked) <= 5


def test_a_large_border_is_found_to_a_thousandth() -> None:
    """What is reserved grows in steps of 20 MiB, and a sample takes 1."""
    asked: list[int] = []

    def excess(size: int) -> float:
        asked.append(size)
        return size // 20 * 20 - 52_228.5

    low, high = settle(excess, guess=51_000, each=1.2)
    assert excess(low) <= 0 < excess(high)
    assert 1 <= high - low <= 53
    assert len(asked) <= 8


def test_a_border_that_is_not_monotone_still_has_a_larger_neighbour_that_fails() -> None:
    def excess(size: int) -> float:
        return 1.0 if size % 3 == 0 and size > 10 else size - 40.0

    low, high = settle(excess, guess=20, each=1.0)
    assert high == low + 1
    assert excess(low) <= 0 < excess(high)
