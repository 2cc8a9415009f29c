"""Try on fake tensors what only shows when a model runs, before any process starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.build.build import apply_precision
from meshwright.build.precision import loss_under
from meshwright.describe.blueprint import record
from meshwright.describe.model import observe
from meshwright.errors import JobError, Refused, one_line
from meshwright.facts.job import Job
from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.engine import DTYPES


def check_precision(job: Job, facts: ModelFacts, strategy: Strategy) -> None:
    """Refuse a precision under which tensors of two dtypes meet: an fp32 buffer and bf16 activations, say."""
    dtype = DTYPES[strategy.precision]
    if dtype == torch.float32 or facts.unseen:
        return
    blueprint = record(job.model, seed=0)
    blocks = [blueprint.model.get_submodule(name) for name in facts.blocks]
    apply_precision(blueprint.model, blocks, dtype, pure=strategy.pure, casts_itself=False)
    try:
        observe(replace(job, loss=loss_under(strategy.precision, job)), blueprint)
    except JobError as error:
        cause = error.__cause__ or error
        raise Refused(
            f"The model does not run in {strategy.precision}: {one_line(cause)} Buffers stay in their own dtype; "
            "cast them to that of the activations where they meet."
        ) from error
