"""A small job whose steps are quick and whose state takes a moment to write: for `faults.py`."""

import random

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from meshwright import Job

WIDTH, CLASSES, SAMPLES = 256, 8, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MadeUp(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        noise = random.random() + numpy.random.rand() + torch.rand(()).item()  # as augmentation draws
        return {"x": torch.randn(WIDTH, generator=generator) + 0.1 * noise, "y": torch.tensor(index % CLASSES)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])


def sample(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH), "y": torch.randint(CLASSES, (n,))}


job = Job(
    model=Model,
    inputs=lambda batch: (batch["x"],),
    loss=loss,
    optimizer=lambda params: AdamW(params, lr=1e-3),
    schedule=lambda optimizer: StepLR(optimizer, 10, 0.9),
    max_norm=1.0,
    data=MadeUp,
    sample=sample,
    global_batch=24,
)
