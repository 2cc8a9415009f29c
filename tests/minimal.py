"""The smallest job that trains, and one process to train it in."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job, Strategy
from meshwright.assemble.step import Trainer
from meshwright.assemble.world import World
from meshwright.describe.model import describe

CPU = torch.device("cpu")
WIDTH = 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))


def sample(samples: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Always the same samples: those of a small batch are the first of a large one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(samples, 2, WIDTH, generator=generator)
    return {"x": values[:, 0], "y": values[:, 1]}


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A mean over samples."""
    return F.mse_loss(output, batch["y"], reduction="sum"), len(batch["y"])


def make_job(**parts: Any) -> Job:
    """A job that works, with some of its parts replaced."""
    whole: dict[str, Any] = {
        "model": mlp,
        "inputs": lambda batch: (batch["x"],),
        "loss": squares,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "sample": sample,
        "global_batch": 8,
    }
    return Job(**whole | parts)


def make_trainer(job: Job, strategy: str = "single", *, seed: int = 0) -> Trainer:
    """One process on the CPU."""
    return Trainer(job, describe(job), Strategy.parse(strategy).resolve(1), World(device=CPU), seed=seed)


class Block(nn.Module):
    """A residual block of a transformer's shape: a norm and two linear layers."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Two blocks and what surrounds them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)
