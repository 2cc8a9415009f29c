"""Parameters that the model does not use: every rank holds them, and DDP has buckets for their gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright import Job
from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.strategy import Strategy
from meshwright.planner.search import consider
from meshwright.tracing import trace_step

WORDS, WIDTH, UNUSED = 1000, 256, 40_000


class Tagger(nn.Module):
    """Embeds words, and could embed entities."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.entities = nn.Embedding(WORDS, WIDTH), nn.Embedding(UNUSED, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


JOB = Job(
    model=Tagger,
    inputs=lambda batch: (batch,),
    loss=lambda output, batch: (F.cross_entropy(output.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()),
    optimizer=lambda params: AdamW(params, lr=1e-3),
    sample=lambda n: torch.randint(WORDS, (n, 64)),
    global_batch=32,
)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("single,fp32", 1), ("single,bf16", 1), ("ddp,bf16", 4), ("fsdp,bf16", 4), ("pp=2:1f1b,bf16", 2)],
)
def test_unused_parameters_are_held(text: str, ranks: int) -> None:
    facts, strategy = describe(JOB), Strategy.parse(text).resolve(ranks)
    assert facts.unused == ("entities.weight",)
    planner = Planner(JOB, facts, JOB.global_batch)
    planner.measure_for(strategy)
    plan = consider(planner.context(Cluster.parse(f"{ranks}xH200")), strategy)
    told = plan.stages[0] if plan.stages else plan.forecast
    traced = trace_step(JOB, facts, strategy, ranks=ranks, rank=0)
    assert traced.peak > 4 * UNUSED * WIDTH // (ranks if "fsdp" in text else 1)
    assert told.peak - told.memory["allocator"] == pytest.approx(traced.peak, rel=0.1)
