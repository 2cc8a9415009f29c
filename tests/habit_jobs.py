"""Small jobs of models with habits that data strategies stumble over."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshwright import Job
from optimizers_of_users import CountsUpdates, Lamb, LocalSums, NormedOverAll, adafactor

WIDTH, TASKS = 6, 4


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["y"], reduction="sum"), len(batch["y"])


def values(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, WIDTH), "y": torch.randn(n, WIDTH)}


def job_of(model: Any, **parts: Any) -> Job:
    whole: dict[str, Any] = {
        "model": model,
        "inputs": lambda batch: (batch["x"],),
        "loss": squares,
        "optimizer": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
        "sample": values,
        "global_batch": 8,
    }
    return Job(**whole | parts)


class Adapters(nn.Module):
    """Blocks in a row, each of which only some samples pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(TASKS))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        y = self.enter(x)
        if bool((task == 1).any()):
            y = y * torch.where(task == 1, self.gain, torch.ones(()))[:, None]
        for number in task.unique().tolist():
            y = torch.where((task == number)[:, None], y + self.blocks[number](y), y)
        return self.leave(y)


def tasks(n: int) -> dict[str, Tensor]:
    """The first half of a batch has other tasks than the second; which ones changes from batch to batch."""
    first = int(torch.randint(2, ()))
    task = torch.cat([torch.full((n - n // 2,), first), torch.full((n // 2,), 1 + first)])
    return {**values(n), "task": task}


adapters = job_of(Adapters, inputs=lambda batch: (batch["x"], batch["task"]), sample=tasks)
adapters_adam = job_of(
    Adapters,
    inputs=lambda batch: (batch["x"], batch["task"]),
    sample=tasks,
    optimizer=lambda params: AdamW(params, lr=0.01),
    max_norm=0.5,
)


class Scaled(nn.Module):
    """Scalars, one of them in a block, and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * self.logit_scale.exp() + self.shift


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class ReadsABlock(Scaled):
    """Uses a block's weight in a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.linear(x, self.blocks[0].down.weight @ self.blocks[1].up.weight))


class CallsIntoABlock(Scaled):
    """Calls a layer of a block by itself, as DiT does with its first block's embedding of the time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.blocks[0].down(torch.tanh(self.blocks[0].up(x))))


class Differentiates(nn.Module):
    """Takes gradients of its own layers, as potentials do, and calls layers once for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DifferentiatingBlock() for _ in range(2))
        self.middle, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = x + vmap(lambda row: torch.tanh(self.middle(row)))(x)
        return self.leave(self.blocks[1](x))


class DifferentiatingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + vmap(grad(lambda row: self.down(torch.tanh(self.up(row))).sum()))(x)


differentiates = job_of(Differentiates)
scaled = job_of(Scaled, optimizer=lambda params: AdamW(params, lr=0.01), max_norm=0.5)
reads_a_block = job_of(ReadsABlock, optimizer=lambda params: AdamW(params, lr=0.01, foreach=True), max_norm=0.5)
calls_into_a_block = job_of(CallsIntoABlock, max_norm=0.5)
lamb = job_of(Scaled, optimizer=Lamb, schedule=CountsUpdates)
normed_over_all = job_of(Scaled, optimizer=NormedOverAll)
local_sums = job_of(Scaled, optimizer=LocalSums)
with_adafactor = job_of(Scaled, optimizer=adafactor)
with_muon = job_of(Scaled, optimizer=lambda params: Muon([p for p in params if p.dim() == 2], lr=0.05))
fused = job_of(Scaled, optimizer=lambda params: AdamW(params, lr=0.01, fused=True))
plateau = job_of(
    Scaled, schedule=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, factor=0.5), max_norm=0.5
)


class Follows(Scaled):
    """A target that follows the last layer by an average, a counter, and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            for old, new in zip(self.target.parameters(), self.leave.parameters(), strict=True):
                old.lerp_(new, 0.5)
        return super().forward(x) + self.normed(self.target(x)) / self.calls


class Counts(Scaled):
    """As above, without a parameter that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x) + self.normed(x) / self.calls


follows, counts = job_of(Follows), job_of(Counts)


class Experts(nn.Module):
    """A mixture: samples decide which experts of a block run, and every block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixtureBlock() for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand([]) < 0.0:  # a chance that never comes decides nothing
            return x
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = self.norm(x), (x[:, 0] * 2).long().clamp(-2, 2) + 2  # the last expert is never chosen
        for number in chosen.unique().tolist():
            y = torch.where((chosen == number)[:, None], y + torch.tanh(self.experts[number](y)), y)
        return x + y


experts = job_of(Experts, global_batch=4)
