"""Batches of made-up samples and random generators that every process makes alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from meshwright.describe.observe import make_batch
from meshwright.facts.job import Job


def seeded_batch(job: Job, seed: int) -> Any:
    """A global batch of made-up samples that every rank makes alike."""
    with generators_kept(), torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        return make_batch(job, job.global_batch)


def seed_generators(seed: int) -> None:
    """PyTorch's, Python's and numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Python's and numpy's generators are put back afterwards."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
