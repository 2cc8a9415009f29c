"""Runs whose numbers stop being finite in a known place."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import meshwright as mw
from meshwright import Job
from meshwright.assemble.world import World
from meshwright.errors import NonFiniteLoss
from meshwright.runtime.train import train

WIDTH, BATCH = 8, 4
MARKED = 6


class Root(nn.Module):
    """A square root of what is about 0 for marked samples: its gradient there is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.clamp(min=0.0) * 1.0)


class Block(nn.Module):
    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        if self.breaks:
            y = y + torch.log(1e3 - x.detach().abs().amax(dim=1, keepdim=True)) * 1e-3
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks=number == 2) for number in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Steep(nn.Module):
    """Finite in the forward pass, not in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.root, self.last = nn.Linear(WIDTH, WIDTH), Root(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        marked = (x.abs().amax(dim=1, keepdim=True) < 1e3).to(x.dtype)
        return self.last(self.root(self.first(x).abs() * marked))


def rows(mark: float) -> list[dict[str, Tensor]]:
    made = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    made[MARKED] = mark
    return [{"x": row, "y": row.new_zeros(1)} for row in made]


def job(model: type[nn.Module], mark: float) -> Job:
    def sample(size: int) -> dict[str, Tensor]:
        return {"x": torch.randn(size, WIDTH), "y": torch.zeros(size, 1)}

    return Job(
        model=model,
        inputs=lambda batch: (batch["x"],),
        loss=lambda output, batch: (F.mse_loss(output, batch["y"], reduction="sum"), len(output)),
        optimizer=lambda parameters: SGD(parameters, lr=1e-3),
        data=rows(mark),
        sample=sample,
        global_batch=BATCH,
    )


def told(world: World | None, model: str, mark: float, strategy: str) -> tuple[str, int]:
    """The error's message, and the steps that the run took before."""
    made = job({"net": Net, "steep": Steep}[model], mark)
    run = mw.setup(made, strategy, device="cpu", world=world)
    try:
        train(run, steps=4, progress=False)
    except NonFiniteLoss as error:
        assert all(bool(torch.isfinite(parameter.detach()).all()) for parameter in map(_local, run.trainer.optimized))
        return str(error), run.trainer.steps
    return "", run.trainer.steps


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
