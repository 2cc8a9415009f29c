"""Seeds of the host's generators while data are read.

They follow from the run's seed and a sample's position in the run. So augmentation is the same on any number of ranks
and workers, and after a resume.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from meshwright.assemble.passes import seed_host

_SAMPLE, _COLLATE = 0, 1


def seed_for_sample(seed: int, place: int) -> None:
    """Before the sample at `place` is read."""
    seed_host((((seed * 1_000_003 + place) * 1_000_003) + _SAMPLE) % 2**63)


def seed_for_collate(seed: int, place: int) -> None:
    """Before samples are collated of which the first is at `place`."""
    seed_host((((seed * 1_000_003 + place) * 1_000_003) + _COLLATE) % 2**63)


class OwnRandom:
    """Host generators of one reader. Inside the context they replace the process's, which are restored afterwards."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed % 2**63
        self._own: tuple[Any, ...] = ()
        self._outer: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outer = _states()
        if self._seed is None:
            _restore(self._own)
        else:
            seed_host(self._seed)
            self._seed = None

    def __exit__(self, *error: object) -> None:
        self._own = _states()
        _restore(self._outer)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
