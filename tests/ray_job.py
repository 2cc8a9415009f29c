"""A job whose steps take long enough for a node to be lost in the middle."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright import Job

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Samples:
    """`seconds`: what reading one takes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": row, "y": row.sum().view(1)}


def make(seconds: float) -> Job:
    return Job(
        model=Net,
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: (F.mse_loss(output, batch["y"], reduction="sum"), len(output)),
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        data=lambda: Samples(seconds),
        sample=lambda size: {"x": torch.randn(size, WIDTH), "y": torch.randn(size, 1)},
        global_batch=8,
    )


job, slow = make(0.0), make(0.1)
