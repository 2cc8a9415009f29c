"""A divided model whose blocks have habits of their authors, run by recorded programs and as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import minimal
import tensor_models
import tensor_programs
from meshwright.strategies.tensor import replay
from meshwright.strategies.tensor.mode import tensor_region
from meshwright.strategies.tensor.replay import BlockState, program_state
from meshwright.strategies.tensor.split import to_plain

WIDTH, LENGTH = 8, 4


class Block(nn.Module):
    """A block whose `habit` is what its author may do to an activation between the layers of a pair."""

    bend = 1.0

    def __init__(self, habit: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.batch_norm = nn.Dropout(0.5), nn.BatchNorm1d(LENGTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.habit, self.factor, self.calls, self.seen = habit, 1.0, 0, []

    def forward(self, x: Tensor) -> Tensor:
        return x + self.habit(self, self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, habit: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(habit) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@cache
def found_plan() -> tuple[Any, Any, tuple[str, ...]]:
    """The job of a model with a plain habit, its plan and its blocks, found once."""

    def sample(n: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(-1, 1, n * LENGTH * WIDTH).view(n, LENGTH, WIDTH)}

    job = minimal.make_job(
        model=lambda: Model(plain_habit), sample=sample, loss=lambda output, batch: (output.sum(), len(batch["x"]))
    )
    return job, *tensor_models.plan_of(job)


def plain_habit(block: Any, x: Tensor) -> Tensor:
    return x * block.factor


def dropout(block: Any, x: Tensor) -> Tensor:
    return block.drop(x) + F.dropout(torch.ones(3)).sum()


def divide(habit: Callable[[Any, Tensor], Tensor], mesh: DeviceMesh) -> nn.Module:
    job, plan, blocks = found_plan()
    assert plan.for_ranks(2).divided and len(blocks) == 3
    model, _ = tensor_programs.divided_model(job, plan, mesh, blocks, tensor_programs.whole_model(job))
    for block in model.blocks:
        block.habit = habit
    return model


@dataclass
class Pass:
    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    random_state: Tensor

    def equals(self, other: "Pass", error: float = 1e-5) -> bool:
        """Whether another pass found the same; sums over rows in another order differ by `error` at most."""
        pairs = [(self.gradients, other.gradients), (self.buffers, other.buffers)]
        same = all(a.keys() == b.keys() and all(_near(a[name], b[name], error) for name in a) for a, b in pairs)
        near = _near(torch.tensor(self.loss), torch.tensor(other.loss), error)
        return same and near and torch.equal(self.random_state, other.random_state)


def _near(a: Tensor, b: Tensor, error: float) -> bool:
    return bool((a - b).abs().max() <= error * b.abs().max())


def run(model: nn.Module, mesh: DeviceMesh, samples: int = 2) -> Pass:
    torch.manual_seed(3)
    x = torch.linspace(-1, 2, samples * LENGTH * WIDTH).view(samples, LENGTH, WIDTH)
    model.zero_grad()
    with tensor_region(mesh):
        loss = to_plain(model(x), mesh).square().sum()
        if loss.requires_grad:
            loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Pass(loss.item(), gradients, buffers, torch.get_rng_state())


def as_it_is(model: nn.Module, mesh: DeviceMesh, samples: int = 2) -> Pass:
    replay.recording(False)
    found = run(model, mesh, samples)
    replay.recording(True)
    return found


def states(model: nn.Module) -> list[BlockState]:
    return [program_state(block) for block in model.blocks]  # type: ignore[union-attr]


def replayed(model: nn.Module) -> int:
    return sum(bound.calls for state in states(model) for bound in state.programs)
