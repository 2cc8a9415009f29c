"""What units of a model keep for backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.describe.model import describe
from meshwright.tracing.costs import measure_costs

WIDTH, TOKENS = 16, 64


class Block(nn.Module):
    """Attention that also returns weights, which `weigh` makes of its scores."""

    def __init__(self, weigh: Any) -> None:
        super().__init__()
        self.ask, self.answer, self.weigh = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), weigh

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.ask(x) @ x.transpose(1, 2)
        return self.answer(scores.softmax(dim=-1) @ x) + x, self.weigh(scores)


class Model(nn.Module):
    def __init__(self, weigh: Any, collects: bool) -> None:
        super().__init__()
        self.blocks, self.collects = nn.ModuleList(Block(weigh) for _ in range(4)), collects

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block in self.blocks:
            outputs = block(x)
            x = outputs[0]
            if self.collects:
                found.append(outputs[1])
        return x.mean() + sum(weights.mean() for weights in found)


def kept(block: int, weigh: Any, collects: bool = False) -> float:
    """Bytes that a block keeps for one sample."""
    job = mw.Job(
        model=lambda: Model(weigh, collects),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output, len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, TOKENS, WIDTH),
        global_batch=4,
    )
    costs = measure_costs(job, describe(job), "fp32")
    return next(unit for unit in costs.units if unit.name == f"blocks.{block}").kept.each


@pytest.mark.parametrize("block", [0, 1])
def test_what_a_block_returns_and_nobody_takes_is_not_kept(block: int) -> None:
    weights = TOKENS * TOKENS * 4
    usual = kept(block, lambda scores: scores.detach().mean())
    assert kept(block, lambda scores: scores * 2) == pytest.approx(usual, abs=1024)
    assert kept(block, lambda scores: scores * 2, collects=True) == pytest.approx(usual + weights, abs=1024)
