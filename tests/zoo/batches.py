"""Batches of every structure."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job
from zoo.jobs import CLASSES, LENGTH, SAMPLES_DIVIDED, VOCABULARY, WIDTH, Trunk, entry, make_job, squares, vectors


def nested(n: int) -> dict[str, Any]:
    return {
        "inputs": {"dense": torch.randn(n, WIDTH), "sparse": [torch.randint(5, (n, 2))]},
        "y": torch.randn(n, CLASSES),
    }


class Recommender(nn.Module):
    """A DLRM in small: dense and sparse features."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.trunk = Trunk()

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        return self.trunk(dense + self.table(sparse[0]).sum(1))


@entry()
def nested_dicts() -> Job:
    """A nested dict with a list inside."""
    return make_job(Recommender, nested, inputs=lambda batch: batch["inputs"])


@dataclass
class Samples:
    x: Tensor
    y: Tensor
    source: str = "made up"


@entry()
def dataclass_batch() -> Job:
    """A dataclass with a string."""
    return make_job(
        Trunk,
        lambda n: Samples(**vectors(n)),
        inputs=lambda batch: (batch.x,),
        loss=lambda output, batch: (F.mse_loss(output, batch.y, reduction="sum"), len(batch.y)),
    )


Pair = namedtuple("Pair", ["x", "y"])


@entry()
def named_tuple_batch() -> Job:
    """A named tuple."""
    return make_job(
        Trunk,
        lambda n: Pair(**vectors(n)),
        inputs=lambda batch: (batch.x,),
        loss=lambda output, batch: (F.mse_loss(output, batch.y, reduction="sum"), len(batch.y)),
    )


class Ragged(nn.Module):
    """Takes sequences of several lengths as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, rows: list[Tensor]) -> Tensor:
        return self.head(torch.stack([torch.tanh(self.layer(row)).sum(0) for row in rows]))


def ragged(n: int) -> dict[str, Any]:
    return {"x": [torch.randn(2 + i % 3, WIDTH) for i in range(n)], "y": torch.randn(n, CLASSES)}


@entry()
def ragged_lists() -> Job:
    """A list of tensors, one for each sample, of several lengths."""
    return make_job(Ragged, ragged)


@entry()
def ragged_alone() -> Job:
    """Nothing but lists of tensors: a pair of lists, as torchvision's detectors take them."""

    def sample(n: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        rows = [torch.randn(3 + i % 2, WIDTH) for i in range(n)]
        return rows, [{"y": torch.randn(CLASSES)} for _ in range(n)]

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(output, torch.stack([t["y"] for t in batch[1]]), reduction="sum"), len(batch[1])

    return make_job(Ragged, sample, inputs=lambda batch: (batch[0],), loss=loss)


LETTERS = "abcdefgh"


class Texts(nn.Module):
    """Takes strings and makes tokens of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(LETTERS), WIDTH)
        self.trunk = Trunk()

    def forward(self, texts: list[str]) -> Tensor:
        index = [torch.tensor([LETTERS.index(letter) for letter in text]) for text in texts]
        return self.trunk(torch.stack([self.letter(i).mean(0) for i in index]))


def texts(n: int) -> dict[str, Any]:
    return {"x": [LETTERS[i % 4 : i % 4 + 2 + i % 3] for i in range(n)], "y": torch.randn(n, CLASSES)}


@entry()
def strings() -> Job:
    """A list of strings."""
    return make_job(Texts, texts)


class Graphs(nn.Module):
    """A graph network over all nodes of a batch, pooled by graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.message = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
        y = torch.tanh(self.enter(nodes))
        y = y + torch.zeros_like(y).index_add(0, edges[1], self.message(y)[edges[0]])
        return self.head(y.new_zeros(graphs, 8).index_add(0, owner, y))


def graph(nodes: int) -> dict[str, Tensor]:
    chain = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
    return {"nodes": torch.randn(nodes, WIDTH), "edges": chain, "y": torch.randn(CLASSES)}


def join_graphs(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As PyG's Batch: nodes of all graphs one after another, edges by number, and whose each node is."""
    sizes = torch.tensor([len(sample["nodes"]) for sample in samples])
    starts = sizes.cumsum(0) - sizes
    return {
        "nodes": torch.cat([sample["nodes"] for sample in samples]),
        "edges": torch.cat([sample["edges"] + start for sample, start in zip(samples, starts, strict=True)], 1),
        "owner": torch.repeat_interleave(torch.arange(len(samples)), sizes),
        "y": torch.stack([sample["y"] for sample in samples]),
    }


def part_graphs(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The inverse of `join_graphs`."""
    found, owner_of_edge = [], batch["owner"][batch["edges"][0]]
    for number, y in enumerate(batch["y"]):
        nodes = batch["nodes"][batch["owner"] == number]
        start = int((batch["owner"] < number).sum())
        found.append({"nodes": nodes, "edges": batch["edges"][:, owner_of_edge == number] - start, "y": y})
    return found


GRAPHS: dict[str, Any] = {
    "sample": lambda n: join_graphs([graph(2 + i % 3) for i in range(n)]),
    "inputs": lambda batch: (batch["nodes"], batch["edges"], batch["owner"], len(batch["y"])),
}


@entry(refused={SAMPLES_DIVIDED: "split"})
def graph_offsets() -> Job:
    """Graphs one after another, with edges that count from the batch's first node."""
    return make_job(Graphs, **GRAPHS)


@entry()
def graphs_with_split() -> Job:
    """The same with a `split`, which says how a batch is taken apart."""
    return make_job(Graphs, **GRAPHS, collate=join_graphs, split=part_graphs)


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
        self.trunk = Trunk()

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.trunk(self.bag(words, offsets))


def join_words(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    sizes = torch.tensor([len(words) for words, _ in samples])
    return {
        "words": torch.cat([words for words, _ in samples]),
        "offsets": sizes.cumsum(0) - sizes,
        "y": torch.stack([y for _, y in samples]),
    }


def part_words(batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `join_words`."""
    rows = batch["words"].tensor_split(batch["offsets"][1:])
    return list(zip(rows, batch["y"], strict=True))


BAGS: dict[str, Any] = {
    "sample": lambda n: join_words([(torch.randint(VOCABULARY, (1 + i % 3,)), torch.randn(CLASSES)) for i in range(n)]),
    "inputs": lambda batch: (batch["words"], batch["offsets"]),
}


@entry(refused={SAMPLES_DIVIDED: "split"})
def bag_offsets() -> Job:
    """Words of all samples one after another, with the offset of each."""
    return make_job(BagOfWords, **BAGS)


@entry()
def bags_with_split() -> Job:
    """The same with a `split`."""
    return make_job(BagOfWords, **BAGS, collate=join_words, split=part_words)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(WIDTH, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][-1])


@entry()
def time_major_batch() -> Job:
    """A batch with time first: dim 0 is not the samples."""
    return make_job(TimeFirst, lambda n: {"x": torch.randn(LENGTH, n, WIDTH), "y": torch.randn(n, CLASSES)})


@entry()
def numbers_beside() -> Job:
    """A batch with a number, a None and a tensor that no sample owns."""

    def sample(n: int) -> dict[str, Any]:
        return {**vectors(n), "scale": 0.5, "nothing": None, "table": torch.linspace(0, 1, WIDTH)}

    return make_job(Trunk, sample, inputs=lambda batch: (batch["x"] * batch["scale"] + batch["table"],), loss=squares)


@entry()
def odd_batch() -> Job:
    """A global batch that no number of ranks divides."""
    return make_job(Trunk, global_batch=7)
