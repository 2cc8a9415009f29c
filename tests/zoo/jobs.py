"""What the zoo's jobs share: batches, losses and optimizers that a model need not bring, and the list of all jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job

WIDTH, CLASSES, VOCABULARY, LENGTH, BATCH = 6, 3, 11, 4, 8

TWO_RANKS = ("ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "tp=2", "op=2", "pp=2:1f1b", "layers=2")
FOUR_RANKS = ("hsdp=2x2", "fsdp=2,tp=2", "ddp=2,pp=2:1f1b")
STRATEGIES = (*TWO_RANKS, *FOUR_RANKS)
SAMPLES_DIVIDED = tuple(strategy for strategy in STRATEGIES if strategy not in ("tp=2", "op=2", "layers=2"))
"""Strategies that cut a batch over ranks or into micro-batches."""
CUT = ("pp=2:1f1b", "layers=2", "ddp=2,pp=2:1f1b")
"""Strategies that cut the model into stages."""
SPLIT = ("tp=2", "fsdp=2,tp=2", "op=2")
"""Strategies that divide single operators."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the zoo and what each strategy must do with it."""

    name: str
    make: Callable[[], Job]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Strategies that must refuse it, each with words of the reason."""
    double: bool = True
    """Whether it runs in float64, where rounding neither hides nor pretends a difference."""

    @property
    def family(self) -> str:
        return self.make.__module__.rpartition(".")[2]


ZOO: dict[str, Entry] = {}


def entry(
    *, refused: Mapping[str | tuple[str, ...], str] | None = None, double: bool = True
) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Put a job into the zoo under its function's name. `refused` maps strategies to words of the reason."""
    spread: dict[str, str] = {}
    for strategies, words in (refused or {}).items():
        spread |= dict.fromkeys([strategies] if isinstance(strategies, str) else strategies, words)

    def add(make: Callable[[], Job]) -> Callable[[], Job]:
        ZOO[make.__name__] = Entry(name=make.__name__, make=make, refused=spread, double=double)
        return make

    return add


def vectors(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH), "y": torch.randn(n, CLASSES)}


def images(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 8, 8), "y": torch.randint(CLASSES, (n,))}


def sequences(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, LENGTH, WIDTH), "y": torch.randn(n, CLASSES)}


def tokens(n: int) -> dict[str, Tensor]:
    text = torch.randint(1, VOCABULARY, (n, LENGTH + 1))
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["y"], reduction="sum"), len(batch["y"])


def class_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])


def token_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    y = batch["y"]
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def mean_of_model(output: Any, batch: Any) -> tuple[Tensor, int]:
    """A mean that the model has computed itself."""
    loss = output["loss"] if isinstance(output, dict) else output
    return loss * len(batch["y"]), len(batch["y"])


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def make_job(model: Callable[[], nn.Module], sample: Callable[[int], Any] = vectors, **parts: Any) -> Job:
    """A job with some of its parts left to the usual ones."""
    losses = {images: class_loss, tokens: token_loss}
    whole: dict[str, Any] = {
        "model": model,
        "inputs": lambda batch: (batch["x"],),
        "loss": losses.get(sample, squares),
        "optimizer": momentum,
        "sample": sample,
        "global_batch": BATCH,
    }
    return Job(**whole | parts)


class Block(nn.Module):
    """A residual block between a model's own habits."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Trunk(nn.Module):
    """Four blocks between two layers: the shape that stages and parts are cut out of."""

    def __init__(self, enter: nn.Module | None = None, leave: nn.Module | None = None, blocks: int = 4) -> None:
        super().__init__()
        self.enter = enter or nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = leave or nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)
