"""What `verify` says about a job that no strategy could train alike."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_jobs
from meshwright.facts.job import Job
from meshwright.verify.causes import find_cause
from tiny_jobs import Plain, class_loss, plain


class StochasticDepth(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(self.second, Skipping())


class Skipping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) < 0.5)


class LayerDrop(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class BatchStatistics(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.centre = Centred()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.centre(torch.tanh(self.first(x))))


class Router(Plain):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"logits": logits, "balance": logits.softmax(-1).mean(0).square().sum()}


class Codebook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.lerp_(x.mean(0), 0.1)
        return super().forward(x + self.codes)


class MovingTarget(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(7, 33).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.weight.lerp_(self.first.weight, 0.1)
        return super().forward(x) + self.target(x).mean(-1, keepdim=True)


def restless() -> nn.Module:
    model, generator = Plain(), torch.Generator()
    generator.seed()
    model.first.weight.data.normal_(generator=generator)
    return model


def balanced_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    total, weight = class_loss(output["logits"], batch)
    return total + weight * output["balance"], weight


def contrastive_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)), reduction="sum"), len(output)


def noisy_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return class_loss(output + torch.randn_like(output), batch)


JOBS = {
    "draws random numbers, first in module second.1 by aten.rand": replace(plain, model=StochasticDepth),
    "draws random numbers from Python's random": replace(plain, model=LayerDrop),
    "draws random numbers, first in the loss by aten.randn": replace(plain, loss=noisy_loss),
    "makes another first.weight each time": replace(plain, model=restless),
    "the output of module centre for a sample depends on the other samples": replace(plain, model=BatchStatistics),
    "the model's output['balance'] is one number": replace(plain, model=Router, loss=balanced_loss),
    "forward changes the buffer codes by the samples": replace(plain, model=Codebook),
    "forward changes the parameter target.weight": replace(plain, model=MovingTarget),
    "the loss depends on which samples share a batch": replace(plain, loss=contrastive_loss),
}


@pytest.mark.parametrize("cause", JOBS)
def test_the_cause_is_named(cause: str) -> None:
    assert cause in find_cause(JOBS[cause], seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize("job", ["plain", "transformer", "masked", "partial", "convolutions", "uneven"])
def test_a_sound_job_has_none(job: str) -> None:
    """Dropout, weights that depend on data, unused parameters and BatchNorm are no cause."""
    sound: Job = getattr(tiny_jobs, job)
    assert find_cause(sound, seed=0, device=torch.device("cpu")) is None
