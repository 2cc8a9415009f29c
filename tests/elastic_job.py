"""A job whose steps take long enough that a host can be lost between two of them."""

import time

import torch
from torch import nn

from meshwright import Job

SAMPLES = 64


class Data:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "y": torch.randn(4, generator=generator)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


job = Job(
    model=lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 4)),
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (((output - batch["y"]) ** 2).sum(), len(output)),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    sample=lambda n: {"x": torch.randn(n, 8), "y": torch.randn(n, 4)},
    data=Data(),
    global_batch=8,
)
