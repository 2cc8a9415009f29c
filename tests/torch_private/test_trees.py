from collections import namedtuple

from meshwright.torch_private.trees import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

Pair = namedtuple("Pair", "left right")
TREE = {"a": [1, (2.0, None)], "b": Pair(3, "text")}


def test_leaves_are_in_order() -> None:
    assert tree_leaves(TREE) == [1, 2.0, None, 3, "text"]


def test_a_tree_is_put_together_again() -> None:
    leaves, spec = tree_flatten(TREE)
    assert isinstance(spec, TreeSpec) and leaves == tree_leaves(TREE)
    assert tree_unflatten(leaves, spec) == TREE


def test_leaves_are_changed() -> None:
    assert tree_map(str, {"a": [1, (2,)]}) == {"a": ["1", ("2",)]}
    assert tree_map_only(int, lambda leaf: -leaf, (1, "text")) == (-1, "text")


def test_leaves_have_a_path() -> None:
    found, _ = tree_flatten_with_path({"a": [1, 2]})
    assert [("".join(map(str, path)), leaf) for path, leaf in found] == [("['a'][0]", 1), ("['a'][1]", 2)]
