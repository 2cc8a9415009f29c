"""Which axes stay within a node, and how that is shown."""

import pytest

from meshwright.assemble.topology import crossing, picture
from meshwright.facts.strategy import Strategy


@pytest.mark.parametrize(
    ("sizes", "per_node", "across"),
    [
        ({"replicate": 2, "shard": 2}, 2, {"replicate"}),
        ({"stage": 2, "data": 2, "tensor": 2}, 4, {"stage"}),
        ({"data": 4, "tensor": 2}, 4, {"data"}),
        ({"tensor": 4}, 2, {"tensor"}),
        ({"data": 3, "tensor": 2}, 3, {"data", "tensor"}),  # the second group of two has a rank on each node
        ({"data": 4}, 4, set()),
    ],
)
def test_axes_that_cross_nodes(sizes: dict[str, int], per_node: int, across: set[str]) -> None:
    assert {name for name, crosses in crossing(sizes, per_node).items() if crosses} == across


def test_the_picture_of_a_hybrid() -> None:
    text = picture(Strategy.parse("hsdp=2x2").resolve(4), ["left", "right"])
    assert text.splitlines() == [
        "hsdp=2x2 on 2 nodes of 2 ranks",
        "  left   [0] replicate 0, shard 0   [1] replicate 0, shard 1",
        "  right  [2] replicate 1, shard 0   [3] replicate 1, shard 1",
        "  within a node: shard (2); between nodes: replicate (2)",
    ]


def test_tensor_axes_between_nodes_are_pointed_out() -> None:
    text = picture(Strategy.parse("tp=4").resolve(4), ["left", "right"])
    assert text.endswith("tp=4 sends in every layer, and now between nodes: 2 or fewer would stay within one")
