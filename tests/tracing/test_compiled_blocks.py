"""The share of kept activations that remains when a model is compiled as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright import Job
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.strategy import Strategy


class Wasteful(nn.Module):
    """Eager code keeps several results that a compiler recomputes from the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(4):
            y = torch.sigmoid(y) * torch.tanh(y)
        return x + self.linear(y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wasteful() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_compiled_model_is_accounted_by_what_its_graph_keeps() -> None:
    job = Job(
        model=Model,
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output.float().square().sum(), len(output)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, 128, 64),
        global_batch=4,
    )
    planner = Planner(job, describe(job), 4)
    planner.measure_for(Strategy.parse("single,bf16,compile"))
    assert planner._compiled["bf16"].kept == pytest.approx(
        0.2, abs=0.15
    )  # eager blocks keep a dozen tensors, compiled two
    assert not planner.notes
