"""Batches of other libraries' classes, padded and sequence-first ones train as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.describe.structure import to_device
from meshwright.facts.job import Job
from meshwright.runtime.run import Run
from minimal import make_trainer

transformers = pytest.importorskip("transformers")
WORDS = 10


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.leave(self.enter(input_ids))


def item(index: int, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    values = torch.randint(0, WORDS, (2, length), generator=generator)
    return {"input_ids": values[0], "labels": values[1]}


def encoded(samples: list[dict[str, Tensor]]) -> Any:
    return transformers.BatchEncoding({key: torch.stack([one[key] for one in samples]) for key in samples[0]})


def sequence_first(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([one[key] for one in samples], 1) for key in samples[0]}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(one["labels"]) for one in samples)
    values = {"input_ids": 0, "labels": -100}
    return {
        key: torch.stack([F.pad(one[key], (0, longest - len(one[key])), value=value) for one in samples])
        for key, value in values.items()
    }


def summed(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")


def job_of(collate: Any, weight: Any, length: Any = lambda index: 5, **parts: Any) -> Job:
    whole: dict[str, Any] = {
        "model": Words,
        "inputs": lambda batch: (batch["input_ids"],),
        "loss": lambda output, batch: (summed(output, batch["labels"]), weight(batch["labels"])),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": [item(index, length(index)) for index in range(40)],
        "collate": collate,
        "sample": lambda count: collate([item(index) for index in range(count)]),
        "global_batch": 6,
    }
    return Job(**whole | parts)


def words(labels: Tensor) -> int:
    return int((labels >= 0).sum())


JOBS = {
    "BatchEncoding": job_of(encoded, words, inputs=lambda batch: batch),
    "samples in dim 1": job_of(sequence_first, lambda labels: labels.numel()),
    "weighed by the sequence": job_of(sequence_first, len),  # does not add up over samples: a loss over the batch
    "padded": job_of(padded, words, lambda index: 3 + index % 5),
    "longer after many": job_of(padded, words, lambda index: 5 if index < 30 else 9),
    "longer than made-up ones": job_of(
        None, lambda labels: labels.numel(), lambda index: 9, sample=lambda count: encoded([item(0)] * count)
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_they_train_alike_however_the_batch_is_cut(name: str) -> None:
    losses = []
    for strategy in ("single", "single,mb=4"):
        run = Run(make_trainer(JOBS[name], strategy))
        losses.append([run.step(batch).loss for batch in run.batches(steps=8)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) == 8


def test_a_batch_encoding_is_moved_as_a_copy() -> None:
    batch = encoded([item(0), item(1)])
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert moved["labels"].is_meta and not batch["labels"].is_meta
