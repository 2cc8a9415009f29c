"""Jobs for `compare`: a plain one, and one that comes to grief under chosen sizes of micro-batches."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from meshwright import Job

KILLED, EXHAUSTED, STUCK = 1, 2, 3
"""Sizes of micro-batches that end a rank, ask for more memory than there is, and never come back."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(x))


class Fragile(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_world_size() == 2 and dist.get_rank() == 1:
            come_to_grief(len(x))
        return super().forward(x)


def come_to_grief(samples: int) -> None:
    if samples == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if samples == EXHAUSTED:
        torch.empty(2**50)
    if samples == STUCK:
        while True:
            time.sleep(1)


def sample(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 8), "y": torch.randint(3, (n,))}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])


sound = Job(
    model=Layers,
    inputs=lambda batch: (batch["x"],),
    loss=loss,
    optimizer=lambda params: AdamW(params, lr=1e-3),
    sample=sample,
    global_batch=16,
)
fragile = replace(sound, model=Fragile)
