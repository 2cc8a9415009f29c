"""The account of `compile` where logits are most of the memory, against a trace of the very step."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright.api.job_planner import Planner
from meshwright.describe.model import describe
from meshwright.facts.cluster import Cluster
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.planner.search import consider
from meshwright.tracing import trace_step

EIGHT = Cluster.parse("8xA100-40GB")
WIDTH, VOCABULARY, LENGTH = 64, 16384, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Predictor(nn.Module):
    """Computes the loss itself if it is given the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sample(count: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (count, LENGTH + 1))
    return {"x": text[:, :-1], "y": text[:, 1:]}


outside = Job(
    model=Predictor,
    inputs=lambda batch: (batch["x"],),
    loss=lambda logits, batch: (
        F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"),
        batch["y"].numel(),
    ),
    optimizer=lambda params: AdamW(params, lr=1e-3),
    sample=sample,
    global_batch=256,
)
inside = replace(
    outside,
    inputs=lambda batch: (batch["x"], batch["y"]),
    loss=lambda output, batch: (output[1] * batch["y"].numel(), batch["y"].numel()),
)


@pytest.mark.parametrize(("job", "in_model"), [(inside, True), (outside, False)], ids=["inside", "outside"])
def test_account_and_trace_of_compiled_steps_agree(job: Job, in_model: bool) -> None:
    """Around blocks that are compiled one by one, the model's own code is eager; the job's loss is compiled."""
    facts = describe(job)
    planner = Planner(job, facts, job.global_batch)
    planner.measure("bf16", "none")
    resolved = Strategy.parse("ddp,bf16,compile,mb=32").resolve(8)
    account = consider(planner.context(EIGHT), resolved)
    trace = trace_step(job, facts, resolved, ranks=8)
    assert account.peak == pytest.approx(trace.peak, rel=0.15)
    assert planner.context(EIGHT).stage_costs._costs["bf16", "none"].loss_in_model == in_model
