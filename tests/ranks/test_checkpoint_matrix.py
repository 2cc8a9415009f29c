"""Every strategy loads every other's checkpoint and goes on as if nothing had happened."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache

import pytest

from checkpoint_moves import SINGLE, Matrix, Move, Node, in_memory
from rank_pool import RankPool

pytestmark = pytest.mark.slow

MakeMatrix = Callable[[str], dict[Node, Future[list[Move]]]]

ALL = [
    SINGLE,
    *(Node("ddp", 2), Node("ddp", 4), Node("zero1", 4), Node("zero2", 2)),
    *(Node("fsdp", 2), Node("fsdp", 4), Node("hsdp=2x2", 4)),
    *(Node("tp=2", 2), Node("tp=2,fsdp", 4), Node("pp=2:1f1b", 2), Node("pp=2:interleaved,fsdp", 4)),
]
MATRICES = {
    "narrow_gpt": ALL,
    "small_cnn": [
        *(SINGLE, Node("ddp", 2), Node("zero2", 2), Node("fsdp", 4), Node("tp=2", 2)),
        *(Node("pp=2:1f1b", 2), Node("pp=2:interleaved,fsdp", 4), Node("op=2", 2), Node("layers=2", 2)),
    ],
    "transformer": [SINGLE, Node("zero1", 4), Node("fsdp", 4), Node("tp=2", 2)],
    "partial": [SINGLE, Node("ddp", 2), Node("zero2", 2), Node("fsdp", 4), Node("pp=2:1f1b", 2)],
    "convolutions": [SINGLE, Node("zero1", 2), Node("fsdp", 4), Node("op=2", 2), Node("layers=2", 2)],
    "plain": [SINGLE, Node("zero1", 2), Node("zero2", 4), Node("pp=2:1f1b", 2)],
    # These cut a batch into the same micro-batches.
    "dropping": [Node("single,mb=2", 1), Node("ddp,mb=2", 2), Node("fsdp,mb=2", 2), Node("ddp", 4)],
}
PRECISIONS = {
    # From each of the first to the last.
    "bf16": [Node("zero1,bf16", 2), Node("ddp,bf16", 4), Node("fsdp,bf16", 2)],
    "fp16": [Node("zero1,fp16", 2), Node("ddp,fp16", 4), Node("fsdp,fp16", 2)],
}


@pytest.fixture(scope="module")
def matrix_of(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> Iterator[MakeMatrix]:
    """A job's matrix with all its results; made when it is first asked for."""
    folder = in_memory()
    pools = {1: one_rank, 2: two_ranks, 4: four_ranks}
    yield cache(lambda job: Matrix(job, MATRICES[job], folder, pools, reference=MATRICES[job][0]).run())
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("job", "target"), [pytest.param(job, node, id=f"{job}-{node}") for job in MATRICES for node in MATRICES[job]]
)
def test_every_strategy_loads_every_other(matrix_of: MakeMatrix, job: str, target: Node) -> None:
    moves = matrix_of(job)[target].result()
    assert len(moves) == len(MATRICES[job])
    assert [problem for move in moves if (problem := move.problem())] == []
