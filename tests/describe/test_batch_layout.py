"""Where samples lie in a batch is learnt by making batches of several sizes, and never guessed."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from meshwright.describe.batch_layout import CannotCut
from meshwright.describe.samples import Cutter
from meshwright.describe.structure import tensors_of
from meshwright.errors import JobError
from minimal import make_job

SAMPLES = 7
RANGES = [(0, 2), (2, 1), (3, 4)]


def number(samples: int) -> Tensor:
    return torch.arange(samples).float()


def ragged(samples: int) -> list[Tensor]:
    return [torch.full((1 + index % 3, 2), float(index)) for index in range(samples)]


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list[str]


class Graphs:
    """As graph libraries batch: all nodes in one tensor, and two methods to get the graphs out and in again."""

    def __init__(self, nodes: Tensor, lengths: list[int]) -> None:
        self.nodes, self.lengths = nodes, lengths

    @classmethod
    def from_data_list(cls, graphs: list[Tensor]) -> "Graphs":
        return cls(torch.cat(graphs), [len(graph) for graph in graphs])

    def to_data_list(self) -> list[Tensor]:
        return list(self.nodes.split(self.lengths))


class Forgetful(Graphs):
    """Gives its graphs without half of what they hold."""

    def to_data_list(self) -> list[Tensor]:
        return [graph[:1] for graph in super().to_data_list()]


def rows(value: Any) -> list[Any]:
    """The samples of a part, as plain numbers."""
    if isinstance(value, Tensor | numpy.ndarray):
        return value.tolist() if not getattr(value, "is_nested", False) else [row.tolist() for row in value.unbind()]
    return [row.tolist() if isinstance(row, Tensor) else row for row in value]


# name: (what makes a batch, what of it holds samples as a list of them)
KNOWN: dict[str, tuple[Any, Any]] = {
    "rows": (lambda n: {"x": number(n), "table": torch.arange(3)}, lambda b: rows(b["x"])),
    "a table as long as the batch": (lambda n: [number(n), torch.arange(SAMPLES)], lambda b: rows(b[0])),
    "time before samples": (lambda n: number(n).expand(4, n), lambda b: rows(b.T)),
    "padded to any length": (
        lambda n: number(n)[:, None].expand(n, int(torch.randint(1, 9, ()))),
        lambda b: rows(b[:, 0]),
    ),
    "ragged": (lambda n: ragged(n), rows),
    "ragged in a tuple": (lambda n: (tuple(ragged(n)), number(n)), lambda b: rows(b[0])),
    "as many rows as samples": (lambda n: [torch.full((n,), float(i)) for i in range(n)], rows),
    "strings": (lambda n: {"text": [f"sample {i}" for i in range(n)]}, lambda b: b["text"]),
    "dicts": (lambda n: [{"x": torch.tensor(float(i)), "id": i} for i in range(n)], lambda b: [s["id"] for s in b]),
    "dataclass": (lambda n: Record(number(n), [str(i) for i in range(n)]), lambda b: rows(b.x) + b.names),
    "mapping": (lambda n: UserDict({"x": number(n), "mode": "train"}), lambda b: rows(b["x"]) + [b["mode"]] * 0),
    "array": (lambda n: {"x": numpy.arange(2 * n).reshape(2, n)}, lambda b: rows(b["x"].T)),
    "nested": (lambda n: torch.nested.nested_tensor(ragged(n), layout=torch.jagged), rows),
    "graphs": (lambda n: {"graphs": Graphs.from_data_list(ragged(n))}, lambda b: rows(b["graphs"].to_data_list())),
}


def cutter(sample: Any, **parts: Any) -> Cutter:
    return Cutter(make_job(sample=sample, **parts))


@pytest.mark.parametrize("name", KNOWN)
def test_parts_hold_the_samples_of_the_batch(name: str) -> None:
    sample, samples_of = KNOWN[name]
    batch, by = sample(SAMPLES), cutter(sample)
    assert by.count(batch) == SAMPLES
    parts = by.cut(batch, RANGES)
    assert [by.count(part) for part in parts] == [length for _, length in RANGES]
    if name not in ("dataclass", "padded to any length"):
        assert [row for part in parts for row in samples_of(part)] == samples_of(batch)
        assert samples_of(by.turned(batch)) == samples_of(batch)[::-1]
    assert all(type(part) is type(batch) for part in parts)
    assert samples_of(by.joined(parts)) == samples_of(batch)
    assert by.count(by.grown(batch, 5)) == 5


def test_what_belongs_to_no_sample_is_kept_whole() -> None:
    batch = KNOWN["rows"][0](SAMPLES)
    for part in cutter(KNOWN["rows"][0]).cut(batch, RANGES):
        assert part["table"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_number_of_samples_is_that_of_the_part(kind: Any) -> None:
    def sample(samples: int) -> Any:
        return {"x": number(samples), "batch_size": kind(samples), "tokens": kind(4 * samples)}

    for part, (_, length) in zip(cutter(sample).cut(sample(SAMPLES), RANGES), RANGES, strict=True):
        assert (part["batch_size"], part["tokens"]) == (kind(length), kind(4 * length))
        assert type(part["tokens"]) is type(kind(1))


def lengths(samples: int) -> Tensor:
    return torch.randint(1, 9, (samples,))


UNKNOWN: dict[str, tuple[Any, str]] = {
    "tokens in one row": (lambda n: {"y": number(n), "x": number(int(lengths(n).sum()))}, r'batch\["x"\]'),
    "several rows a sample": (lambda n: {"y": number(n), "x": number(3 * n)}, r'batch\["x"\]'),
    "offsets": (lambda n: (number(n), number(n + 1)), r"batch\[1\]"),
    "pairs of samples": (lambda n: {"y": number(n), "mask": torch.ones(n, n)}, r'batch\["mask"\] has 2 dims'),
    "a sum over samples": (lambda n: {"y": number(n), "count": lengths(n).sum()}, r'batch\["count"\]'),
    "a number of the data": (
        lambda n: {"y": number(n), "count": int(lengths(n).sum())},
        r'batch\["count"\] is a number',
    ),
    "an object": (lambda n: {"y": number(n), "more": object()}, r'batch\["more"\] is an object'),
    "lists of tokens": (
        lambda n: {"y": number(n), "x": lengths(n).tolist() * 2},
        r'batch\["x"\] holds different',
    ),
    "another structure": (lambda n: {"y": number(n), f"{n}": 1}, "batch holds different"),
    "another type": (lambda n: number(n) if n > 2 else [number(n)], "batch has different types"),
    "graphs in part": (lambda n: {"y": number(n), "g": Forgetful.from_data_list(ragged(n))}, r'batch\["g"\] is not'),
    "nothing": (lambda n: {"y": 1}, "batch has nothing whose size"),
    "only two": (lambda n: number(n) if n == 2 else 1 / 0, r"Job\(sample=...\) raised ZeroDivisionError"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_is_refused_by_name(name: str) -> None:
    sample, named = UNKNOWN[name]
    with pytest.raises(CannotCut, match=rf"{named}.*cannot be cut into samples. Give Job\(split=...\)"):
        cutter(sample).cut(sample(2), RANGES[:1])


def test_a_batch_unlike_those_that_the_job_makes() -> None:
    by = cutter(lambda n: {"x": number(n)})
    with pytest.raises(CannotCut, match=r'batch holds \["x"\], \["z"\], but the batches that the job made hold'):
        by.cut({"x": number(4), "z": number(4)}, RANGES[:1])
    assert by.count({"z": number(4)}) is None


def test_unlike_numbers_of_samples() -> None:
    by = cutter(lambda n: {"x": number(n), "y": number(n)})
    with pytest.raises(JobError, match=r'batch\["x"\] holds 4 samples, but batch\["y"\] holds 3'):
        by.count({"x": number(4), "y": number(3)})


def test_batches_of_the_data_are_known_too() -> None:
    """Also where made-up ones look otherwise."""
    by = cutter(lambda n: {"x": number(n)}, data=[torch.ones(2) * i for i in range(4)])
    assert [len(part) for part in by.cut(torch.ones(7, 2), RANGES)] == [2, 1, 4]
    assert [len(part["x"]) for part in by.cut({"x": number(7)}, RANGES)] == [2, 1, 4]


def packed(graphs: list[Tensor]) -> dict[str, Tensor]:
    return {"x": torch.cat(graphs), "lengths": torch.tensor([len(graph) for graph in graphs])}


def unpacked(batch: dict[str, Tensor]) -> list[Tensor]:
    return list(batch["x"].split(batch["lengths"].tolist()))


def test_split_is_asked_where_it_is_given() -> None:
    by = cutter(lambda n: packed(ragged(n)), collate=packed, split=unpacked)
    batch = packed(ragged(SAMPLES))
    assert by.count(batch) == SAMPLES
    parts = by.cut(batch, RANGES)
    assert [part["lengths"].tolist() for part in parts] == [[1, 2], [3], [1, 2, 3, 1]]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert by.turned(batch)["lengths"].tolist() == batch["lengths"].tolist()[::-1]


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (lambda batch: [], r"Job\(split=...\) returned no samples"),
        (lambda batch: unpacked(batch)[:-1], r"Job\(split=...\) returned 1 samples for a batch of 2"),
        (lambda batch: 1 / 0, r"Job\(split=...\) raised ZeroDivisionError"),
    ],
)
def test_a_split_that_does_not_split(split: Any, said: str) -> None:
    by = cutter(lambda n: packed(ragged(n)), collate=packed, split=split)
    with pytest.raises(JobError, match=said):
        by.cut(packed(ragged(4)), RANGES)


def test_looking_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = (torch.rand(()), numpy.random.rand())
    torch.manual_seed(1)
    state = numpy.random.get_state()
    numpy.random.seed(2)
    first = numpy.random.rand()
    numpy.random.seed(2)
    cutter(lambda n: (torch.rand(n), numpy.random.rand(n))).count(torch.ones(2))
    assert (torch.rand(()), numpy.random.rand()) == (expected[0], first)
    numpy.random.set_state(state)


def test_samples_of_one_size() -> None:
    assert cutter(lambda n: torch.rand(n, 3)).is_regular(torch.rand(2, 3))
    assert not cutter(lambda n: torch.rand(n, int(torch.randint(1, 99, ())))).is_regular(torch.rand(2, 3))
    assert not cutter(lambda n: [torch.rand(int(size)) for size in lengths(n)]).is_regular([torch.ones(1)])
    assert tensors_of(Graphs.from_data_list(ragged(2)))[0].shape == (3, 2)
