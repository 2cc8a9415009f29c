"""FSDP gathers a model at once if it reads values around its blocks, because ranks may call different ones."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright import Job
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.forecast import Forecast
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.tracing import trace_step

WIDTH = 1024
GIB = 2**30


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


class Layers(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layers, self.reads = nn.ModuleList(Layer() for _ in range(12)), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads and x.sum() > 1e9:
            return x
        for layer in self.layers:
            x = layer(x)
        return x


def job_of(reads: bool, *, rows: int) -> Job:
    return Job(
        model=lambda: Layers(reads),
        inputs=lambda batch: (batch,),
        loss=lambda output, batch: (output.float().square().sum(), len(output)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        sample=lambda count: torch.randn(count, rows, WIDTH),
        global_batch=64,
    )


def forecast(job: Job, facts: ModelFacts) -> Forecast:
    cluster = Cluster(nodes=1, devices_per_node=8, device="H200-141GB")
    (plan,) = Planner(job, facts, 64).search_named(cluster, [Strategy.parse("fsdp,bf16")]).plans
    return plan.forecast


@pytest.mark.parametrize("reads", [False, True])
def test_the_account_gathers_such_a_model_at_once(reads: bool) -> None:
    job = job_of(reads, rows=1)
    facts = describe(job)
    assert facts.blocks_by_value == reads
    assert bool(facts.gathered_units) != reads
    told = forecast(job, facts)
    traced = trace_step(job, facts, Strategy.parse("fsdp,bf16"), ranks=8)
    assert abs(told.peak - told.memory["allocator"] - traced.peak) < 0.05 * GIB  # of 0.32 and 0.77


def test_nothing_overlaps_one_gather_and_one_sum() -> None:
    job = job_of(False, rows=4096)
    usual = describe(job)
    few, one = (forecast(job, facts).time["data"] for facts in (usual, replace(usual, blocks_by_value=True)))
    assert 2 * few < one
