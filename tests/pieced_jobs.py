"""Small jobs with output layers of many kinds, and what tests run on real ranks with the loss in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright import Job
from meshwright.assemble.world import World
from meshwright.pieced_loss import logits as pieced_logits
from meshwright.verify.verdict import Verdict
from meshwright.verify.verify import verify
from shared_facts import facts_of, references_of

CLASSES, WIDTH, LENGTH = 48, 16, 6
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.token.weight

    def hidden(self, x: Tensor) -> Tensor:
        y = self.token(x)
        for block in self.blocks:
            y = block(y)
        found: Tensor = self.norm(y)
        return found

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x))


class Biased(Tied):
    """A head as large as a block, so that it is a shard unit of its own, that is not called last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden), self.value(hidden)


class Functional(Tied):
    """The output layer is no module."""

    def forward(self, x: Tensor) -> Any:
        return self.hidden(x) @ self.token.weight.t()


class OwnLoss(Tied):
    """Computes its loss itself, and returns the logits too."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = super().forward(x)
        loss = F.cross_entropy(logits.float().view(-1, CLASSES), y.reshape(-1), reduction="sum")
        return {"loss": loss, "logits": logits}


def total(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def ignoring(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    y = batch["y"].masked_fill(batch["y"] % 4 == 0, -100)[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), y, reduction="none")
    return losses.sum(), (y != -100).sum()


def with_value(output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    found, weight = total(output[0], batch)
    return found + output[1].square().sum(), weight


def sample(count: int) -> Batch:
    tokens = torch.randint(0, CLASSES, (count, LENGTH + 1))
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


tied = Job(
    model=Tied,
    inputs=lambda batch: (batch["x"],),
    loss=total,
    optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
    sample=sample,
    global_batch=8,
)
biased = replace(tied, model=Biased, loss=with_value)
functional = replace(tied, model=Functional)
weighed = replace(tied, loss=ignoring)
own_loss = replace(
    tied,
    model=OwnLoss,
    inputs=lambda batch: (batch["x"], batch["y"]),
    loss=lambda output, batch: (output["loss"], batch["y"].numel()),
)
squared = replace(
    tied, loss=lambda logits, batch: (total(logits, batch)[0] + logits.square().sum(), batch["y"].numel())
)
no_head = replace(tied, loss=lambda logits, batch: (logits.square().sum(), len(logits)))


def verdicts(world: World, job: str, strategies: list[str]) -> tuple[list[Verdict], set[str]]:
    """The verdicts, and the functions that needed real logits on this rank."""
    chosen, needed, run = globals()[job], set(), pieced_logits._on_real

    def noting(func: Any, args: Any, kwargs: Any) -> Any:
        needed.add(f"{func.__name__} {getattr(getattr(func, '__self__', None), '__name__', '')}".strip())
        return run(func, args, kwargs)

    with patch.object(pieced_logits, "_on_real", noting):
        references = references_of(world, chosen)
        found = list(verify(chosen, facts_of(world, chosen), strategies, world, references=references))
    return found, needed
