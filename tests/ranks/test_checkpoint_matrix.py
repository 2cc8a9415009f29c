"""Every strategy loads every other's checkpoint and goes on as if nothing had happened."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from checkpoint_moves import SINGLE, Matrix, Node, in_memory

pytestmark = pytest.mark.slow

MakeMatrix = Callable[..., Matrix]

ALL = [
    SINGLE,
    *(Node("ddp", 2), Node("ddp", 4), Node("zero1", 2), Node("zero2", 4)),
    *(Node("fsdp", 2), Node("fsdp", 4), Node("hsdp=2x2", 4)),
    *(Node("tp=2", 2), Node("tp=2,fsdp", 4), Node("pp=2:1f1b", 2), Node("pp=2:interleaved,fsdp", 4)),
]
MATRICES = {
    "narrow_gpt": ALL,
    "small_cnn": [
        *(SINGLE, Node("ddp", 2), Node("zero1", 2), Node("zero2", 2), Node("fsdp", 4), Node("hsdp=2x2", 4)),
        *(Node("tp=2", 2), Node("tp=2,fsdp", 4), Node("pp=2:1f1b", 2), Node("pp=2:interleaved,fsdp", 4)),
        *(Node("op=2", 2), Node("layers=2", 2)),
    ],
    "transformer": [SINGLE, Node("fsdp", 4), Node("tp=2,fsdp", 4), Node("pp=2:1f1b", 2)],
    "partial": [SINGLE, Node("ddp", 2), Node("zero2", 2), Node("fsdp", 4), Node("pp=2:1f1b", 2)],
    "convolutions": [SINGLE, Node("zero1", 2), Node("fsdp", 4), Node("op=2", 2), Node("layers=2", 2)],
    "plain": [SINGLE, Node("zero1", 2), Node("zero2", 4), Node("pp=2:1f1b", 2)],
    # These cut a batch into the same micro-batches.
    "dropping": [Node("single,mb=2", 1), Node("ddp,mb=2", 2), Node("fsdp,mb=2", 2), Node("zero1", 4)],
}


@pytest.fixture(scope="module")
def matrix_of(request: pytest.FixtureRequest) -> Iterator[MakeMatrix]:
    """A job's matrix, made when it is first asked for."""
    folder = in_memory()
    made: dict[str, Matrix] = {}

    def pool(ranks: int):  # type: ignore[no-untyped-def]
        return request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[ranks])

    def make(job: str, **options: object) -> Matrix:
        key = f"{job} {options}"
        if key not in made:
            made[key] = Matrix(job, folder / str(len(made)), pool, **options)
        return made[key]

    yield make
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("job", "target"),
    [pytest.param(job, node, id=f"{job}-{node}") for job, nodes in MATRICES.items() for node in nodes],
)
def test_every_strategy_loads_every_other(matrix_of: MakeMatrix, job: str, target: Node) -> None:
    nodes = MATRICES[job]
    moves = matrix_of(job, reference=nodes[0]).moves(nodes, target)
    assert [problem for move in moves if (problem := move.problem())] == []
