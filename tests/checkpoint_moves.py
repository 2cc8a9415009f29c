"""Every strategy's checkpoint loaded by every other: what tests/ranks/test_checkpoint_matrix.py and
benchmarks/move_matrix.py both run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path

import checkpoint_programs as programs
from checkpoint_jobs import facts_of
from checkpoint_programs import AFTER, BEFORE, Arrival, Setup, Stretch
from rank_pool import RankPool

LOSS_RTOL = 1e-5


@dataclass(frozen=True)
class Node:
    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy} on {self.ranks}"


SINGLE = Node("single", 1)


@dataclass(frozen=True)
class Move:
    """A run that was saved under one strategy and went on under another, beside one that was not interrupted."""

    source: Node
    target: Node
    arrival: Arrival
    expected: Stretch
    """The last steps of the run that was not interrupted."""

    @property
    def loss_difference(self) -> float:
        """The largest, relative."""
        pairs = zip(self.arrival.stretch.losses, self.expected.losses, strict=True)
        apart = [abs(found - wanted) / abs(wanted) for found, wanted in pairs]
        return max(apart) if all(map(isfinite, apart)) else float("inf")

    @property
    def same_samples(self) -> bool:
        found = self.arrival.stretch
        return (found.batches, found.position) == (self.expected.batches, self.expected.position)

    def problem(self, loss_rtol: float = LOSS_RTOL, *, compare_state: bool = True) -> str | None:
        """What is wrong with it, in one sentence."""
        distance = self.arrival.distance
        found = None
        if self.arrival.changed:
            found = f"saved again right after loading, {self.arrival.changed}"
        elif not self.same_samples:
            found = f"other samples, or at {self.arrival.stretch.position} instead of {self.expected.position}"
        elif self.loss_difference > loss_rtol:
            found = f"losses {self.arrival.stretch.losses} instead of {self.expected.losses}"
        elif compare_state and not distance.ratio <= 1.0:
            found = f"{distance.tensor} is {distance.ratio:.1f} times as far off as rounding may be"
        return f"{self.source} -> {self.target}: {found}" if found else None


class Matrix:
    """One job's moves. Each source is trained once, each target built once; files lie in `folder`."""

    def __init__(
        self, job: str, folder: Path, pool: Callable[[int], RankPool], *, reference: Node = SINGLE, lossy: bool = False
    ) -> None:
        """`reference` is the run that is not interrupted; `lossy` moves change the dtype of parameters."""
        self.job, self.reference, self.lossy = job, reference, lossy
        self._folder, self._pool = folder, pool
        self._sources: dict[Node, str] = {}

    @cached_property
    def expected(self) -> Stretch:
        """The last steps of the reference, which took them all in one go."""
        whole = self._train(self.reference, "expected", BEFORE + AFTER)
        return Stretch(whole.losses[BEFORE:], whole.batches[BEFORE:], whole.position)

    def moves(self, sources: list[Node], target: Node) -> list[Move]:
        expected = self.expected
        folders = [self._source(node) for node in sources]
        arrivals = self._pool(target.ranks)(
            programs.go_on, self._setup(target), folders, self._path("expected"), self._path(""), self.lossy
        )[0]
        return [Move(source, target, arrival, expected) for source, arrival in zip(sources, arrivals, strict=True)]

    def _source(self, node: Node) -> str:
        if node not in self._sources:
            name = f"source-{len(self._sources)}"
            self._train(node, name, BEFORE)
            self._sources[node] = self._path(name)
        return self._sources[node]

    def _train(self, node: Node, name: str, steps: int) -> Stretch:
        trained: Stretch = self._pool(node.ranks)(programs.train_and_save, self._setup(node), self._path(name), steps)[
            0
        ]
        return trained

    def _setup(self, node: Node) -> Setup:
        return Setup(self.job, facts_of(self.job), node.strategy)

    def _path(self, name: str) -> str:
        return str(self._folder / self.job / name)


def in_memory() -> Path:
    """A new folder, in memory where the machine has such a place: thousands of flushes to a disk take minutes."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    return Path(tempfile.mkdtemp(prefix="meshwright-moves-", dir=memory if roomy else None))
