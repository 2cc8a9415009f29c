"""Every strategy loads every other's checkpoint and goes on as if nothing had happened.

Between the many nodes of the two larger jobs not every pair is tried: every node loads every kind of parts that a
checkpoint can be written in, and every checkpoint is loaded whole and in parts. All pairs: benchmarks/move_matrix.py.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from checkpoint_moves import LOSS_RTOL, SINGLE, Loads, Matrix, Move, Node, in_memory
from meshwright.checkpoint.manifest import read_manifest
from rank_pool import RankPool

pytestmark = pytest.mark.slow

ResultsOf = Callable[[str], dict[Node, Future[list[Move]]]]

MATRICES = {
    "narrow_gpt": [
        *(SINGLE, Node("zero1", 4), Node("fsdp", 4), Node("hsdp=2x2", 4)),
        *(Node("tp=2,fsdp", 4), Node("pp=2:interleaved,fsdp", 4)),
    ],
    "small_cnn": [
        *(SINGLE, Node("ddp", 2), Node("zero2", 2), Node("fsdp", 4), Node("tp=2", 2)),
        *(Node("pp=2:1f1b", 2), Node("pp=2:interleaved,fsdp", 4), Node("op=2", 2), Node("layers=2", 2)),
    ],
    "transformer": [SINGLE, Node("fsdp", 4), Node("tp=2", 2)],
    "partial": [SINGLE, Node("ddp", 2), Node("fsdp", 4), Node("pp=2:1f1b", 2)],
    "convolutions": [SINGLE, Node("zero1", 2), Node("fsdp", 4), Node("op=2", 2), Node("layers=2", 2)],
    "plain": [SINGLE, Node("zero1", 2), Node("zero2", 4), Node("pp=2:1f1b", 2)],
    # These cut a batch into the same micro-batches.
    "dropping": [Node("single,mb=2", 1), Node("fsdp,mb=2", 2), Node("ddp", 4)],
}


LARGE = "small_cnn"
"""What the others do not hold, `convolutions` does."""
ALL_PAIRS_UP_TO = 5
"""Nodes."""
WRITTEN = {SINGLE, Node("fsdp", 4), Node("tp=2,fsdp", 4), Node("op=2", 2), Node("pp=2:interleaved,fsdp", 4)}
"""Whole tensors; parts along dim 0; along two dims, or of single operators; only the tensors of a rank's own stages."""
LOADED = {SINGLE, Node("fsdp", 4)}
"""Whole, and in parts."""


def loads_among(nodes: list[Node]) -> Loads:
    every = len(nodes) <= ALL_PAIRS_UP_TO
    return lambda target, source: every or source in WRITTEN or target in LOADED or source == target


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Moves under a policy, on the transformer."""

    reference: str
    sources: tuple[Node, ...]
    targets: tuple[Node, ...]
    loss_rtol: float = LOSS_RTOL
    compare_state: bool = True
    lossy: bool = False
    loss_scale: Mapping[str, float] | None = None
    """What the sources saved of it."""


# Where less than fp32 is computed with, ranks round what one process does not: losses agree to its last places only.
POLICIES = {
    "bf16": Policy(
        reference="single,bf16",
        sources=(Node("zero1,bf16", 2), Node("ddp,bf16", 2)),
        targets=(Node("fsdp,bf16", 4), Node("zero2,bf16", 2)),
        loss_rtol=1e-2,
        compare_state=False,
    ),
    "fp16": Policy(
        reference="single,fp16",
        sources=(Node("zero1,fp16", 2), Node("fsdp,fp16", 2)),
        targets=(Node("ddp,fp16", 2),),
        loss_rtol=2e-3,
        compare_state=False,
        # It began at 256 and doubled at the second step; a target that began anew would save another one.
        loss_scale={"value": 512.0, "growth": 2.0, "interval": 2, "steps_since": 1},
    ),
    "offload": Policy(
        reference="single,offload=optimizer",
        sources=(Node("ddp,offload=optimizer", 2), Node("fsdp,offload=params", 2)),
        targets=(Node("fsdp,offload=optimizer", 4), Node("zero1,offload=optimizer", 2), Node("fsdp,offload=params", 2)),
    ),
    "pure-to-fp32": Policy(
        reference="single,bf16:pure",
        sources=(Node("fsdp,bf16:pure", 2),),
        targets=(SINGLE, Node("zero1", 2)),
        loss_rtol=2e-2,
        lossy=True,
    ),
    "fp32-to-pure": Policy(
        reference="single",
        sources=(Node("zero1", 2),),
        targets=(Node("fsdp,bf16:pure", 2),),
        loss_rtol=2e-2,
        lossy=True,
    ),
    "fp32-to-less": Policy(
        reference="single",
        sources=(Node("fsdp", 2),),
        targets=(Node("zero2,bf16", 2), Node("fsdp,fp16", 2)),
        loss_rtol=2e-2,
        compare_state=False,
    ),
}


@pytest.fixture(scope="module")
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = in_memory()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def results_of(pools: dict[int, RankPool], folder: Path) -> ResultsOf:
    """All of a job's results; made when they are first asked for."""

    def run(job: str) -> dict[Node, Future[list[Move]]]:
        nodes = MATRICES[job]
        return Matrix(job, nodes, folder, pools, reference=nodes[0]).run(loads=loads_among(nodes))

    return cache(run)


@pytest.mark.parametrize(
    ("job", "target"),
    [
        pytest.param(job, node, id=f"{job}-{node}", marks=[pytest.mark.thorough] if job == LARGE else [])
        for job in MATRICES
        for node in MATRICES[job]
    ],
)
def test_every_strategy_loads_every_other(results_of: ResultsOf, job: str, target: Node) -> None:
    moves = results_of(job)[target].result()
    nodes = MATRICES[job]
    assert [move.source for move in moves] == [source for source in nodes if loads_among(nodes)(target, source)]
    assert [problem for move in moves if (problem := move.problem())] == []


@pytest.mark.parametrize(
    "name", [name if name == "bf16" else pytest.param(name, marks=pytest.mark.thorough) for name in POLICIES]
)
def test_policies(pools: dict[int, RankPool], folder: Path, name: str) -> None:
    policy = POLICIES[name]
    reference = Node(policy.reference, 1)
    matrix = Matrix("transformer", policy.targets, folder / name, pools, reference=reference, lossy=policy.lossy)
    moves = [move for arrived in matrix.run(policy.sources).values() for move in arrived.result()]
    assert len(moves) == len(policy.sources) * len(policy.targets)
    problems = [move.problem(policy.loss_rtol, compare_state=policy.compare_state) for move in moves]
    assert [problem for problem in problems if problem] == []
    for source in policy.sources:
        assert read_manifest(matrix.folder_of(source)).run_state.loss_scale == policy.loss_scale
