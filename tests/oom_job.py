"""A job whose ranks get too little memory for ddp: a limit on what a process may allocate stands for a small device."""

import os
import resource
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset

from meshwright import Job

WIDTH, BLOCKS = 1024, 12
ROOM = 400 * 2**20  # ddp needs four copies of 96 MiB of parameters, and what a step takes besides


def limit_memory() -> None:
    """Let this rank allocate `ROOM` bytes more."""
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(used.split()[1]) * 1024 + ROOM, hard))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), index / 64), "y": torch.tensor(index % 10)}


job = Job(
    model=Net,
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (F.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])),
    optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
    data=Samples,
    sample=lambda size: {"x": torch.randn(size, WIDTH), "y": torch.zeros(size, dtype=torch.long)},
    global_batch=8,
)

if "RANK" in os.environ:
    limit_memory()
