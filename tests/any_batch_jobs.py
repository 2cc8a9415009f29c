"""Jobs whose batches are not tensors of as many rows as there are samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.facts.job import Job

WIDTH = 4
ITEMS = 26


def sequence(index: int) -> Tensor:
    """Of another length than its neighbours."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(1 + index * 5 % 7, WIDTH, generator=generator)


def items(count: int) -> list[Tensor]:
    return [sequence(int(index)) for index in torch.randint(0, 1000, (count,))]


class Pooled(nn.Module):
    """Reads sequences of any lengths, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, sequences: list[Tensor]) -> list[Tensor]:
        return [self.leave(torch.tanh(self.enter(rows)).cumsum(0)) for rows in sequences]


def next_step(output: list[Tensor], sequences: list[Tensor]) -> tuple[Tensor, int]:
    """A mean over all steps of all sequences, whose number is an ordinary one."""
    pairs = list(zip(output, sequences, strict=True))
    return torch.stack([(out - rows).square().sum() for out, rows in pairs]).sum(), sum(len(out) for out in output)


@dataclass(frozen=True)
class Packed:
    """All sequences in one tensor."""

    rows: Tensor
    lengths: Tensor
    names: list[str] = field(default_factory=list)

    @property
    def sequences(self) -> list[Tensor]:
        return list(self.rows.split(self.lengths.tolist()))


def pack(samples: list[Tensor]) -> Packed:
    lengths = torch.tensor([len(rows) for rows in samples])
    return Packed(torch.cat(samples), lengths, [f"{len(rows)} rows" for rows in samples])


class Graphs:
    """As graph libraries batch: an object with two methods to get the samples out and in again."""

    def __init__(self, rows: Tensor, lengths: list[int]) -> None:
        self.rows, self.lengths = rows, lengths

    @classmethod
    def from_data_list(cls, samples: list[Tensor]) -> Graphs:
        return cls(torch.cat(samples), [len(rows) for rows in samples])

    def to_data_list(self) -> list[Tensor]:
        return list(self.rows.split(self.lengths))

    def to(self, device: torch.device, non_blocking: bool = False) -> Graphs:
        return Graphs(self.rows.to(device, non_blocking=non_blocking), self.lengths)


def padded(samples: list[Tensor]) -> dict[str, Any]:
    lengths = torch.tensor([len(rows) for rows in samples])
    return {"rows": nn.utils.rnn.pad_sequence(samples), "lengths": lengths}


def unpadded(batch: dict[str, Any]) -> list[Tensor]:
    return [batch["rows"][:length, index] for index, length in enumerate(batch["lengths"].tolist())]


def as_list(batch: Any) -> list[Tensor]:
    return list(batch)


def make(collate: Any, sequences_of: Any, **parts: Any) -> Job:
    whole: dict[str, Any] = {
        "model": Pooled,
        "inputs": lambda batch: (sequences_of(batch),),
        "loss": lambda output, batch: next_step(output, sequences_of(batch)),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "data": lambda: [sequence(index) for index in range(ITEMS)],
        "collate": collate,
        "sample": lambda count: collate(items(count)),
        "global_batch": 8,
        "max_norm": 1.0,
    }
    return Job(**whole | parts)


ragged = make(as_list, as_list)
time_major = make(padded, unpadded)
packed = make(pack, lambda batch: batch.sequences, split=lambda batch: batch.sequences)
unsplit = make(pack, lambda batch: batch.sequences)
graphs = make(Graphs.from_data_list, lambda batch: batch.to_data_list())
JOBS = {"ragged": ragged, "time_major": time_major, "packed": packed, "graphs": graphs}
