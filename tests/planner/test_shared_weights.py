"""Weights that several units read count once in the account."""

import pytest
import torch
from torch import nn

from meshwright import Job
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import Strategy
from meshwright.tracing import trace_step

WIDTH = 2048


class Loop(nn.Module):
    """The same two layers again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x + self.second(torch.relu(self.first(x)))
        return x


@pytest.mark.parametrize("strategy", ["single,bf16", "ddp,bf16"])
def test_weights_that_every_step_of_a_loop_reads_are_cast_and_summed_once(strategy: str) -> None:
    job = Job(
        model=Loop,
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output.float().square().sum(), len(output)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, WIDTH),
        global_batch=64,
    )
    ranks = 1 if strategy.startswith("single") else 8
    facts = describe(job)
    cluster = Cluster(nodes=1, devices_per_node=ranks, device="H200-141GB")
    (plan,) = Planner(job, facts, 64).search_named(cluster, [Strategy.parse(strategy)]).plans
    memory = plan.forecast.memory
    traced = trace_step(job, facts, Strategy.parse(strategy), ranks=ranks)
    # The loop's gradients are summed in bf16 until its first step has run backward; the account counts them in fp32.
    assert sum(memory.values()) - memory["allocator"] == pytest.approx(traced.peak, rel=0.2)
