"""Models that nobody wrote for a pipeline are cut as they are: architectures of transformers, and habits of authors.

The whole table takes minutes: `python benchmarks/architectures.py`.
"""

import pytest
import torch

from architecture_jobs import ARCHITECTURES, HABITS
from meshwright.assemble.check import check
from meshwright.assemble.dry_run import dry_run
from meshwright.describe.model import describe
from meshwright.errors import Refused
from meshwright.facts.strategy import Strategy
from meshwright.runtime.place import place_for
from rank_pool import RankPool
from zoo.programs import Case, examine

ODD = [
    "Llama",  # rotary tables and a cache, which the author's code makes on every stage
    "ALBERT",  # one layer that is called four times, so both stages hold it
    "Mixtral",  # experts that are chosen by values
    # an encoder and a decoder over one embedding, and positions that cross the cut as integers
    pytest.param("ProphetNet", marks=pytest.mark.thorough),
]
IN_FLOAT32 = {"Mixtral"}
"""Its grouped products know no float64."""
ADVICE = {"Counted": r"blocks\.0 returns a number that may depend on the data.*return tensors"}


def check_equal(pool: RankPool, name: str) -> None:
    outcome = examine(Case("architecture_jobs", name, double=name not in IN_FLOAT32, exact=False), "pp=2:1f1b", pool)
    assert outcome.verdict == "equal", outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_an_architecture_is_plain_pytorch(two_ranks: RankPool, name: str) -> None:
    pytest.importorskip("transformers")
    check_equal(two_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HABITS if name not in ADVICE])
def test_a_habit_is_plain_pytorch(two_ranks: RankPool, name: str) -> None:
    check_equal(two_ranks, name)


@pytest.mark.parametrize("name", ADVICE)
def test_what_a_stage_could_not_know_is_refused(name: str) -> None:
    torch.manual_seed(0)
    job = HABITS[name]
    facts = describe(job)
    with pytest.raises(Refused, match=ADVICE[name]):
        dry_run(job, facts, check(job, facts, Strategy.parse("pp=2:1f1b"), place_for("cpu", 2)))


def test_two_towers_of_one_class_over_one_embedding_are_looked_into() -> None:
    pytest.importorskip("transformers")
    blocks = describe(ARCHITECTURES["T5"]).blocks
    assert blocks == tuple(f"{tower}.block.{index}" for tower in ("encoder", "decoder") for index in range(4))
