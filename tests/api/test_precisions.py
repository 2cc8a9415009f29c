"""Models that do not run in every precision are planned in the others."""

from pathlib import Path

import pytest

from meshwright.api.job_planner import PlanOptions, open_planner
from meshwright.errors import JobError
from meshwright.facts.cluster import Cluster
from meshwright.planner.candidates import Allowed

JOB = """
import torch
from torch import nn
from torch.optim import SGD
from meshwright import Job


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        if x.dtype != torch.float32:
            raise TypeError("this layer computes in float32 only")
        return self.second(x)


job = Job(
    model=Model,
    inputs=lambda batch: (batch,),
    loss=lambda output, batch: (output.square().sum(), len(batch)),
    optimizer=lambda params: SGD(params, lr=0.1),
    sample=lambda n: torch.ones(n, 8),
    global_batch=8,
)
"""
CLUSTER = Cluster.parse("2xH200")


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.py").write_text(JOB)
    return str(tmp_path / "job.py")


def test_named_strategies_that_cannot_be_measured_are_refused_one_by_one(job: str) -> None:
    options = PlanOptions(strategies=("ddp,bf16", "ddp,fp32"), fast=True)
    found = open_planner(job, options).search(CLUSTER, options)
    assert [str(plan.strategy) for plan in found.plans] == ["ddp=2"]
    ((refused, reason),) = [(one.strategy, one.reason) for one in found.refused]
    assert refused == "ddp,bf16" and "float32 only" in reason and "in Model.forward" in reason
    assert found.candidates == 2


def test_a_search_leaves_out_a_precision_and_says_so(job: str) -> None:
    options = PlanOptions(allowed=Allowed(precisions=("bf16", "fp32")), fast=True)
    planner = open_planner(job, options)
    found = planner.search(CLUSTER, options)
    assert found.plans and {plan.strategy.precision for plan in found.plans} == {"fp32"}
    assert planner.notes[0].startswith("Nothing is planned in bf16. ")


def test_without_another_precision_it_is_an_error_that_names_one(job: str) -> None:
    options = PlanOptions(allowed=Allowed(precisions=("bf16",)), fast=True)
    with pytest.raises(JobError, match=r"float32 only.*plan with --precision fp32\.$"):
        open_planner(job, options).search(CLUSTER, options)
    named = PlanOptions(strategies=("ddp,bf16",), fast=True)
    with pytest.raises(JobError, match="float32 only"):
        open_planner(job, named).search(CLUSTER, named)
