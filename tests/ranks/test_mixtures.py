"""Experts that are divided over data ranks train like plain PyTorch, and move to any other strategy.

The whole table takes minutes: `python benchmarks/mixture_table.py`.
"""

from pathlib import Path

import pytest
import torch

import checkpoint_programs as programs
from checkpoint_jobs import facts_of
from checkpoint_programs import Setup
from meshwright.assemble.world import alone
from rank_pool import RankPool
from zoo.programs import Case, examine

IN_FLOAT32 = {"Mixtral"}
"""Its grouped products know no float64."""
ON_TWO = ["stacked by hand", "list by hand", pytest.param("Mixtral", marks=pytest.mark.thorough)]
ON_FOUR = [
    ("stacked by hand", "ep=2,fsdp=2"),
    ("list by hand", "ep=2,fsdp=2"),
    pytest.param("stacked by hand", "ep=2,tp=2", marks=pytest.mark.thorough),
    pytest.param("stacked by hand", "ep=2,pp=2:1f1b", marks=pytest.mark.thorough),
    pytest.param("list by hand", "ep=4", marks=pytest.mark.thorough),
]
STEPS = 2


def check_equal(pool: RankPool, name: str, strategy: str) -> None:
    if name in IN_FLOAT32:
        pytest.importorskip("transformers")
    outcome = examine(Case("mixture_jobs", name, double=name not in IN_FLOAT32, exact=False), strategy, pool)
    assert outcome.verdict == "equal", outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO)
def test_divided_experts_are_plain_pytorch(two_ranks: RankPool, name: str) -> None:
    check_equal(two_ranks, name, "ep=2")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), ON_FOUR)
def test_so_are_hybrids(four_ranks: RankPool, name: str, strategy: str) -> None:
    check_equal(four_ranks, name, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["stacked_mixture", "listed_mixture"])
def test_a_run_moves_from_ddp_over_divided_experts_tp_and_cp_to_one_process(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, job: str
) -> None:
    facts, world = facts_of(job), alone(torch.device("cpu"))
    way = [("ddp", two_ranks), ("ep=2,fsdp=2", four_ranks), ("tp=2", two_ranks), ("cp=2", two_ranks)]
    folders = [str(tmp_path / str(number)) for number in range(len(way))]
    losses = way[0][1](programs.train_and_save, Setup(job, facts, "ddp"), folders[0], STEPS)[0].losses
    for number, (strategy, pool) in enumerate(way[1:], 1):
        setting = Setup(job, facts, strategy)
        stretch = pool(programs.resume_and_save, setting, folders[number - 1], folders[number], STEPS)[0]
        losses = [*losses, *stretch.losses]
    last = programs.make_run(world, Setup(job, facts, "single"))
    last.load(folders[-1])
    losses = [*losses, *programs.take_steps(last, STEPS).losses]
    whole = programs.make_run(world, Setup(job, facts, "single"))
    expected = programs.take_steps(whole, (len(way) + 1) * STEPS).losses
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, tensor in whole.state().items():
        torch.testing.assert_close(last.state()[name], tensor, rtol=1e-4, atol=1e-5)
