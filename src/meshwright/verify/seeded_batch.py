"""Synthetic batches and seeded random generators that are the same in every process."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from meshwright.describe.observe import make_batch
from meshwright.describe.samples import own_random_numbers
from meshwright.facts.job import Job


def seeded_batch(job: Job, seed: int) -> Any:
    """A global batch of synthetic samples, the same on every rank."""
    with own_random_numbers(seed):
        return make_batch(job, job.global_batch)


def seed_generators(seed: int) -> None:
    """Seed the generators of PyTorch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
