"""Checkpoints go from DeepSpeed to every other strategy and back."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_moves import SINGLE, Matrix, Node, in_memory
from meshwright.strategies.deepspeed.package import is_installed
from rank_pool import RankPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="DeepSpeed is not installed: pip install 'meshwright[deepspeed]'"),
]

MATRICES = {
    "narrow_gpt": [
        *(SINGLE, Node("ddp", 2), Node("fsdp", 2), Node("tp=2", 2)),
        *(Node("zero1,engine=deepspeed", 2), Node("zero2,engine=deepspeed", 2), Node("zero3,engine=deepspeed", 2)),
    ],
    "partial": [
        *(SINGLE, Node("ddp,engine=deepspeed", 2), Node("zero1,engine=deepspeed", 2)),
        *(Node("zero3,engine=deepspeed", 4), Node("zero2,offload=optimizer,engine=deepspeed", 4)),
    ],
    "convolutions": [SINGLE, Node("zero2,engine=deepspeed", 4), Node("zero3,engine=deepspeed", 2)],
    "sequential": [
        *(SINGLE, Node("pp=2:1f1b", 2), Node("zero3,engine=deepspeed", 2)),
        *(Node("pp=2:1f1b,engine=deepspeed", 2), Node("pp=2:1f1b,zero1,engine=deepspeed", 4)),
    ],
}
LOWERED = {
    "bf16": ["zero1,bf16,engine=deepspeed", "zero2,bf16,engine=deepspeed", "zero3,bf16,engine=deepspeed", "fsdp,bf16"],
    "fp16": ["zero2,fp16,engine=deepspeed", "zero3,fp16,engine=deepspeed", "zero1,fp16"],
}


@pytest.fixture(scope="module")
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = in_memory()
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    "job",
    [
        "convolutions",
        *(pytest.param(job, marks=pytest.mark.thorough) for job in ("sequential", "partial", "narrow_gpt")),
    ],
)
def test_every_strategy_loads_every_other(pools: dict[int, RankPool], folder: Path, job: str) -> None:
    results = Matrix(job, MATRICES[job], folder, pools).run()
    moves = [move for arrived in results.values() for move in arrived.result()]
    assert len(moves) == len(MATRICES[job]) ** 2
    assert [problem for move in moves if (problem := move.problem())] == []


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_and_loss_scale_move(pools: dict[int, RankPool], folder: Path, precision: str) -> None:
    """What is saved again right after loading is the same bit by bit: fp32 masters, though DeepSpeed computes in less.

    `partial` has frozen parameters, of which DeepSpeed keeps no masters.
    """
    nodes = [Node(text, 2) for text in LOWERED[precision]]
    reference = Node(f"single,{precision}", 1)
    results = Matrix("partial", nodes, folder / precision, pools, reference=reference).run()
    moves = [move for arrived in results.values() for move in arrived.result()]
    assert [problem for move in moves if (problem := move.problem(2e-2, compare_state=False))] == []
