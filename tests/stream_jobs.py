"""Streams of every kind that people write, and jobs that train on them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from meshwright.facts.job import Job

WIDTH = 4
SAMPLES = 45


def sequence(index: int) -> dict[str, Any]:
    """A sample of another length than its neighbours, with its number."""
    generator = torch.Generator().manual_seed(index)
    return {"index": index, "rows": torch.randn(1 + index * 5 % 7, WIDTH, generator=generator)}


class Shuffled(IterableDataset[dict[str, Any]]):
    """Shuffles through a buffer with the global generator, anew in every epoch."""

    def __init__(self, samples: int = SAMPLES, buffer: int = 7) -> None:
        self.samples, self.buffer = samples, buffer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        held: list[int] = []
        for index in range(self.samples):
            held.append(index)
            if len(held) == self.buffer:
                yield sequence(held.pop(random.randrange(len(held))))
        random.shuffle(held)
        yield from map(sequence, held)


class Counted(IterableDataset[dict[str, Any]]):
    """Keeps its own place."""

    def __init__(self, samples: int = SAMPLES, lost: int = 0) -> None:
        """`lost` samples are skipped after `load_state_dict`, as those in a shuffle buffer are."""
        self.samples, self.lost, self.next, self.start = samples, lost, 0, 0
        self.reads = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.next, self.start = self.start, 0
        while self.next < self.samples:
            self.next += 1
            self.reads += 1
            yield sequence(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"] + self.lost


class DividedByWorker(IterableDataset[dict[str, Any]]):
    """Gives each worker its share, as the documentation of PyTorch recommends."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(sequence, range(first, SAMPLES, step))


class DividedByVariable(IterableDataset[dict[str, Any]]):
    """Gives each rank of a launcher its share."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(sequence, range(int(os.environ.get("RANK", "0")), SAMPLES, int(os.environ.get("WORLD_SIZE", "1"))))


class DividedByGroup(IterableDataset[dict[str, Any]]):
    """Gives each rank of the process group its share."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(sequence, range(torch.distributed.get_rank(), SAMPLES, torch.distributed.get_world_size()))


class Failing(IterableDataset[dict[str, Any]]):
    """Raises in the middle, perhaps only on one rank."""

    def __init__(self, at: int = 20, rank: int | None = None) -> None:
        self.at, self.rank = at, rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(SAMPLES):
            if index == self.at and (self.rank is None or self.rank == torch.distributed.get_rank()):
                raise ValueError("bad sample")
            yield sequence(index)


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded to the longest of a micro-batch."""
    rows = [sample["rows"] for sample in samples]
    lengths = torch.tensor([len(one) for one in rows])
    index = torch.tensor([sample["index"] for sample in samples])
    return {"rows": nn.utils.rnn.pad_sequence(rows, batch_first=True), "lengths": lengths, "index": index}


class PerRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(rows)))


def of_rows(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A mean over rows; those of the padding do not count."""
    real = torch.arange(output.shape[1]) < batch["lengths"][:, None]
    return ((output - batch["rows"].roll(1, -1)).square().sum(-1) * real).sum(), int(batch["lengths"].sum())


def make(data: Any, **parts: Any) -> Job:
    whole: dict[str, Any] = {
        "model": PerRow,
        "inputs": lambda batch: (batch["rows"],),
        "loss": of_rows,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "data": data,
        "collate": padded,
        "global_batch": 6,
        "max_norm": 1.0,
    }
    return Job(**whole | parts)
