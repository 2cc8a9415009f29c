"""A layer index remembers whether it was used: whatever could depend on its value uses it."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.describe.block_equality import LayerIndex, layer_indices


@pytest.mark.parametrize(
    "use",
    [
        lambda number: number + 1,
        lambda number: 1 + number,
        lambda number: number % 2 == 0,
        lambda number: number > 3,
        lambda number: [0, 1, 2, 3, 4, 5][number],
        lambda number: range(number),
        lambda number: "yes" if number else "no",
        lambda number: {5: "five"}.get(number),
        lambda number: f"layer {number}",
        lambda number: isinstance(number, int),
        lambda number: float(number) ** 0.5,
        lambda number: number.bit_length(),
        lambda number: torch.zeros(6)[number],
        operator.index,
    ],
)
def test_what_depends_on_it_asks(use: Callable[[Any], Any]) -> None:
    number = LayerIndex(5)
    found = use(number)
    assert number.used
    assert found == use(5)


def test_handing_it_on_does_not_ask() -> None:
    number = LayerIndex(5)
    held = {"number": [number]}
    assert held["number"][0] is number
    assert number is not None
    assert not number.used


def test_attributes_are_put_back() -> None:
    block: Any = nn.Sequential(nn.Linear(2, 2))
    block.place, block[0].place = 3, 4
    with layer_indices(block, [("", "place"), ("0", "place")]) as numbers:
        assert block[0].place is numbers[1]
        block.place = 9
    assert (block.place, block[0].place) == (9, 4)
