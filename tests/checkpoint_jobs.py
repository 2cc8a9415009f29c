"""Jobs that checkpoints are moved with: examples and tiny ones, such that every strategy trains them alike.

Dropout is off, because other cuts of a batch draw other masks (but see `dropping`). Where a gradient is all rounding
(the key's bias), Adam's usual eps turns the rounding into a whole step: so eps is larger.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import mixture_jobs
import tiny_jobs
from meshwright import Job
from meshwright.describe.model import describe
from meshwright.facts.model import ModelFacts
from meshwright.jobs.load import load_job
from meshwright.verify.plain_training import seeded_batch

EXAMPLES = Path(__file__).parents[1] / "examples"
EPS = 1e-4


@cache
def job_of(name: str, strategy: str = "") -> Job:
    """A job by its name in `JOBS`, with the hints that a strategy needs; made once in a process."""
    if name == "narrow_gpt" and "interleaved" in strategy:
        return replace(job_of(name), stages=NARROW_STAGES)
    return gently(JOBS[name]()) if not strategy else job_of(name)


@cache
def facts_of(name: str) -> ModelFacts:
    """Found in one process and sent to the ranks."""
    return describe(job_of(name))


def gpt() -> Job:
    return load_job(str(EXAMPLES / "gpt.py"))


def narrow_gpt() -> Job:
    """The same with two narrow blocks; the last batch of an epoch leaves two of four ranks without samples."""
    job = gpt()
    example: Any = sys.modules[job.model.__module__]
    example.WIDTH, example.LENGTH, example.LAYERS = 32, 16, 2
    return with_data(replace(job, global_batch=4), 18)


NARROW_STAGES = ("token", "blocks.0", "blocks.1", "norm")
"""Where four stages begin, which the planner of stages makes of four blocks only."""


def cnn() -> Job:
    return without_dropout(load_job(str(EXAMPLES / "cnn.py")))


def small_cnn() -> Job:
    """The same model on made-up images, in small batches."""
    return with_data(replace(cnn(), global_batch=4), 18)


def transformer() -> Job:
    """A vocabulary of 31: shards are uneven."""
    return with_data(without_dropout(tiny_jobs.transformer), 36)


def sequential() -> Job:
    """A sequence of layers; epochs end with a batch that does not divide."""
    return with_data(without_dropout(tiny_jobs.sequential), 36)


def dropping() -> Job:
    """With dropout. Strategies that cut a batch into the same micro-batches draw the same masks, so epochs are even."""
    return with_data(tiny_jobs.transformer, 40)


def partial() -> Job:
    """Frozen, unused, tied and nearly empty parameters."""
    return with_data(without_dropout(tiny_jobs.partial), 36)


def convolutions() -> Job:
    """BatchNorm: buffers that training changes, one of them an integer."""
    return with_data(tiny_jobs.convolutions, 36)


def plain() -> Job:
    """A parameter without dims."""
    return with_data(tiny_jobs.plain, 36)


def stacked_mixture() -> Job:
    """Experts as stacked weights."""
    return with_data(mixture_jobs.by_hand("stacked"), 36)


def listed_mixture() -> Job:
    """Experts as modules of a list."""
    return with_data(mixture_jobs.by_hand("listed"), 36)


JOBS: dict[str, Callable[[], Job]] = {
    make.__name__: make
    for make in (
        *(gpt, narrow_gpt, cnn, small_cnn, transformer, sequential, dropping, partial, convolutions, plain),
        *(stacked_mixture, listed_mixture),
    )
}


def with_data(job: Job, samples: int) -> Job:
    """Made-up samples as a data set, the same in every process."""
    batch = seeded_batch(replace(job, global_batch=samples), seed=1)
    return replace(job, data=[take_row(batch, index) for index in range(samples)])


def take_row(batch: Any, index: int) -> Any:
    return tree_map(lambda leaf: leaf[index], batch)


def without_dropout(job: Job) -> Job:
    def build() -> nn.Module:
        model = job.model()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        return model

    return replace(job, model=build)


def gently(job: Job) -> Job:
    def build(params: Any) -> Optimizer:
        optimizer = job.optimizer(params)
        for group in optimizer.param_groups:
            if "eps" in group:
                group["eps"] = EPS
        return optimizer

    return replace(job, optimizer=build)
