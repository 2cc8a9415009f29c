"""A run that is saved and taken up by a new one ends, bit for bit, where the uninterrupted run does."""

from pathlib import Path

import pytest

import checkpoint_programs
import recovery_programs
from checkpoint_contents import first_change
from checkpoint_jobs import facts_of
from checkpoint_programs import AFTER, Setup
from meshwright.checkpoint.manifest import RNG
from meshwright.checkpoint.whole_tensors import WholeTensors
from rank_pool import RankPool

pytestmark = pytest.mark.slow

JOB = "dropping"
"""Dropout, a schedule, clipping, a tied weight. Its gradients come in another order than DDP guesses, so buckets that
move after the first step show in it."""

# Sums over four ranks round by their order; over two there is only one.
STRATEGIES = ["ddp", "fsdp", "tp=2,fsdp", "pp=2:1f1b"]
ALIKE = ("zero1", "zero2", "hsdp=2x2", "ddp,bf16", "fsdp,fp16")
THOROUGH = [pytest.param(strategy, marks=pytest.mark.thorough) for strategy in ALIKE]


@pytest.mark.parametrize("strategy", [*STRATEGIES, *THOROUGH])
def test_a_resumed_run_ends_at_the_same_bits(four_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    context = Setup(JOB, facts_of(JOB), strategy)
    whole, half, end = (tmp_path / name for name in ("whole", "half", "end"))
    four_ranks(checkpoint_programs.train_and_save_twice, context, str(half), str(whole))
    assert first_change(half, whole) is not None
    four_ranks(recovery_programs.resume_and_save, context, str(half), AFTER, str(end))
    assert first_change(end, whole) is None
    assert generators(end) == generators(whole)


def generators(folder: Path) -> dict[str, list[float]]:
    """The ranks' own, which must be there after a move between equal numbers of ranks."""
    tensors = WholeTensors(folder)
    found = {name: tensors.read(name) for name in tensors.manifest.tensors if name.startswith(RNG)}
    assert len(found) == 4 * len(("torch", "python", "numpy"))
    return {name: tensor.tolist() for name, tensor in found.items()}
