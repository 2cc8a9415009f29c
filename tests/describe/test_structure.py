"""Batches of any structure are walked through: nothing is passed over, and nothing but tensors is changed."""

import gc
import weakref
from collections import UserDict, UserList, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from meshwright.describe.structure import leaves_of, map_tensors, parts_of, tensors_of, to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str = "a"
    inner: list[Tensor] = field(default_factory=list)


@dataclass
class Checked:
    x: Tensor
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.x)


class Graph:
    """Holds tensors in its attributes, some of them further down, and itself."""

    def __init__(self) -> None:
        self.x, self.more, self.me = torch.ones(2), {"y": [torch.ones(3)]}, self


class Slotted:
    __slots__ = ("never_set", "x")

    def __init__(self) -> None:
        self.x = torch.ones(2)


class Mover:
    """Knows how to move, and that one of its tensors does not."""

    def __init__(self, x: Tensor, lengths: Tensor) -> None:
        self.x, self.lengths = x, lengths

    def to(self, device: torch.device) -> "Mover":
        return Mover(self.x.to(device), self.lengths)


def ones() -> Tensor:
    return torch.ones(2)


STRUCTURES: dict[str, tuple[Any, int]] = {
    "tensor": (ones(), 1),
    "tree": ({"a": [ones(), (ones(), "b", None)]}, 2),
    "named tuple": (Pair(ones(), [ones()]), 2),
    "mapping": (UserDict({"a": ones(), 3: UserList([ones(), 1])}), 2),
    "frozen dataclass": (Frozen(ones(), "b", [ones()]), 2),
    "dataclass": (Checked(ones()), 1),
    "object": ([Graph(), 1], 2),
    "slots": (Slotted(), 1),
    "nothing": ({"a": "b"}, 0),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_tensor_is_found_and_replaced(name: str) -> None:
    structure, count = STRUCTURES[name]
    assert len(tensors_of(structure)) == count
    changed = map_tensors(lambda tensor: tensor + 1, structure)
    assert type(changed) is type(structure)
    assert [tensor.tolist() for tensor in tensors_of(changed)] == [[2.0] * len(t) for t in tensors_of(structure)]
    assert all(bool((tensor == 1).all()) for tensor in tensors_of(structure)), "the original is left as it was"
    assert all(tensor.is_meta for tensor in tensors_of(to_device(structure, META)))


def test_what_is_not_a_tensor_is_kept() -> None:
    frozen = map_tensors(lambda tensor: tensor, Frozen(ones(), "b"))
    assert (frozen.name, frozen.inner) == ("b", [])
    changed = map_tensors(lambda tensor: tensor[:1], Checked(ones()))
    assert changed.count == 2, "a dataclass is not made anew"
    graph = map_tensors(lambda tensor: tensor + 1, Graph())
    assert graph.me is graph


def test_an_object_without_change_is_itself() -> None:
    graph = Graph()
    assert map_tensors(lambda tensor: tensor, [graph])[0] is graph


def test_an_object_that_moves_itself() -> None:
    moved = to_device({"a": Mover(ones(), ones())}, META)["a"]
    assert (moved.x.is_meta, moved.lengths.is_meta) == (True, False)
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), torch.device("cpu"))
    assert isinstance(packed, PackedSequence)


def test_parts_are_named_as_python_reads_them() -> None:
    named = {"a": ('["a"]',), "b": (".x", ".name", ".inner"), "c": (".x", ".y"), "d": ("[0]", "[1]"), "e": ("[3]",)}
    values = {"a": {"a": 1}, "b": Frozen(ones()), "c": Pair(1, 2), "d": [1, 2], "e": UserDict({3: 1})}
    for name, value in values.items():
        parts = parts_of(value)
        assert parts is not None
        assert parts.names == named[name]


def test_leaves() -> None:
    assert leaves_of({"a": [1, ("b", None)], "c": Pair(2, 3)}) == [1, "b", None, 2, 3]


@pytest.mark.parametrize(
    "make", [lambda x: {"x": [x]}, lambda x: Pair(x, x), lambda x: Frozen(x), lambda x: UserList([x])]
)
def test_tensors_are_freed_without_the_garbage_collector(make: Any) -> None:
    """A batch on a GPU that waits for the collector takes memory, and makes peaks differ from run to run."""
    gc.disable()
    try:
        tensor = torch.zeros(2)
        batch = map_tensors(lambda x: x, make(tensor))
        assert tensors_of(batch) and leaves_of(batch)
        found = weakref.ref(tensor)
        del tensor, batch
        assert found() is None
    finally:
        gc.enable()
