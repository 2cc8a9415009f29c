"""Whether samples may decide what runs, in blocks and around them."""

import pytest
import torch
from torch import Tensor, nn

import habit_jobs
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from minimal import WIDTH, Blocks, make_job


class Dropping(Blocks):
    """Leaves out blocks by chance."""

    chance = 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if torch.rand([]) >= self.chance:
                x = block(x)
        return self.leave(x)


class NeverDropping(Dropping):
    chance = 0.0


class Lists(nn.Linear):
    """Reads its input as a list, which is no operator."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if sum(x[0].tolist()) < 1e9 else x


@pytest.mark.parametrize(
    ("job", "in_blocks", "around"),
    [
        (make_job(model=Blocks), False, False),
        (make_job(model=Dropping), True, True),
        (make_job(model=NeverDropping), False, False),
        (make_job(model=Lists), True, True),
        (habit_jobs.adapters, True, True),
        (habit_jobs.experts, True, False),
    ],
)
def test_who_decides(job: Job, in_blocks: bool, around: bool) -> None:
    facts = describe(job)
    assert (facts.by_value, facts.blocks_by_value) == (in_blocks, around)
    assert not facts.by_value or not facts.unused
