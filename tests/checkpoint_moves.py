"""Every strategy's checkpoint loaded by every other: what tests/ranks/test_checkpoint_matrix.py and
benchmarks/move_matrix.py both run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
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
Loads = Callable[[Node, Node], bool]
"""Whether a target (the first one) loads what a source saved."""


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
        found, distance = None, self.arrival.distance
        if self.arrival.changed:
            found = f"saved again right after loading, {self.arrival.changed}"
        elif not self.same_samples:
            found = f"other samples, or at {self.arrival.stretch.position} instead of {self.expected.position}"
        elif not self.loss_difference <= loss_rtol:
            found = f"losses {self.arrival.stretch.losses} instead of {self.expected.losses}"
        elif compare_state and distance and not distance.ratio <= 1.0:
            found = f"{distance.tensor} is {distance.ratio:.1f} times as far off as rounding may be"
        return f"{self.source} -> {self.target}: {found}" if found else None


class Matrix:
    """One job's moves between all pairs of nodes. Each source is trained once, each target built once."""

    def __init__(
        self,
        job: str,
        nodes: Sequence[Node],
        folder: Path,
        pools: Mapping[int, RankPool],
        *,
        reference: Node = SINGLE,
        lossy: bool = False,
        tell: Callable[[str], None] = lambda progress: None,
    ) -> None:
        """`reference` is the run that is not interrupted; `lossy` moves change the dtype of parameters."""
        self.job, self.nodes, self.reference, self.lossy = job, nodes, reference, lossy
        self._folder, self._pools, self._facts, self._tell = folder / job, pools, facts_of(job), tell
        self._end = self._folder / "expected"

    def run(
        self, sources: Sequence[Node] | None = None, *, loads: Loads = lambda target, source: True
    ) -> dict[Node, Future[list[Move]]]:
        """What came of all sources (None: all nodes) under each node that `loads` them.

        Pools of unlike sizes work side by side.
        """
        with ExitStack() as stack:
            lanes = {ranks: stack.enter_context(ThreadPoolExecutor(1)) for ranks in self._pools}
            whole = lanes[self.reference.ranks].submit(self._train, self.reference, self._end, BEFORE + AFTER)
            saved = {
                node: lanes[node.ranks].submit(self._train, node, self.folder_of(node), BEFORE)
                for node in (self.nodes if sources is None else sources)
            }
            for training in (whole, *saved.values()):
                training.result()
            done = whole.result()
            expected = Stretch(done.losses[BEFORE:], done.batches[BEFORE:], done.position)
            loaded = {node: [source for source in saved if loads(node, source)] for node in self.nodes}
            return {node: lanes[node.ranks].submit(self._arrive, loaded[node], node, expected) for node in self.nodes}

    def _arrive(self, sources: list[Node], target: Node, expected: Stretch) -> list[Move]:
        folders = [str(self.folder_of(source)) for source in sources]
        scratch = str(self.folder_of(target).with_suffix(".again"))
        arrivals = self._pools[target.ranks](
            programs.go_on, self._setup(target), folders, str(self._end), scratch, self.lossy
        )[0]
        self._tell(f"{self.job}: {target} went on from {len(sources)} checkpoints")
        return [Move(source, target, arrival, expected) for source, arrival in zip(sources, arrivals, strict=True)]

    def _train(self, node: Node, folder: Path, steps: int) -> Stretch:
        trained: Stretch = self._pools[node.ranks](programs.train_and_save, self._setup(node), str(folder), steps)[0]
        self._tell(f"{self.job}: {node} took {steps} steps")
        return trained

    def _setup(self, node: Node) -> Setup:
        return Setup(self.job, self._facts, node.strategy)

    def folder_of(self, node: Node) -> Path:
        """What a source saved."""
        return self._folder / f"{node.strategy}-{node.ranks}"


def in_memory() -> Path:
    """A new folder, in memory where the machine has such a place: thousands of flushes to a disk take minutes."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    return Path(tempfile.mkdtemp(prefix="meshwright-moves-", dir=memory if roomy else None))
