"""Models with habits train under data strategies as in a plain loop."""

from pathlib import Path

import pytest
import torch

import habit_jobs
import habit_programs
from plain_loop import train_plainly
from rank_pool import RankPool

pytestmark = pytest.mark.slow

STEPS = 4
EACH = ["ddp", "zero1", "zero2", "fsdp"]


def check(pool: RankPool, job: str, strategies: list[str]) -> None:
    chosen = getattr(habit_jobs, job)
    losses, state = train_plainly(chosen, habit_programs.batches(chosen, STEPS))
    for strategy in strategies:
        for outcome in pool(habit_programs.train, job, strategy, STEPS):
            assert not isinstance(outcome, str), f"{strategy}: {outcome}"
            found_losses, found = outcome
            assert found_losses == pytest.approx(losses, rel=1e-5), strategy
            for name, expected in state.items():
                torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=f"{strategy}: {name}")


@pytest.mark.parametrize("job", ["adapters", "adapters_adam"])
def test_samples_decide_which_parameters_a_rank_uses(two_ranks: RankPool, job: str) -> None:
    check(two_ranks, job, [*EACH, "ddp,mb=2", "zero1,mb=2", "zero2,mb=2", "fsdp,mb=2", "hsdp=2x1,mb=2", "fsdp:grad-op"])


def test_samples_decide_which_experts_of_a_block_run(two_ranks: RankPool) -> None:
    check(two_ranks, "experts", [*EACH, "fsdp,mb=1", "fsdp:grad-op", "hsdp=1x2", "fsdp,ac=full"])


@pytest.mark.parametrize(
    "job", ["scaled", "reads_a_block", pytest.param("calls_into_a_block", marks=pytest.mark.thorough)]
)
def test_parameters_that_fsdp_leaves_whole(two_ranks: RankPool, job: str) -> None:
    check(two_ranks, job, [*EACH, "fsdp,mb=2", "hsdp=2x1", "hsdp=1x2,mb=2", "fsdp:no-shard"])
    check(two_ranks, job, ["fsdp,offload=optimizer", "fsdp,offload=params", "fsdp,ac=full"])


def test_models_that_use_transforms(two_ranks: RankPool) -> None:
    """`torch.func`, whose tensors have no storage."""
    check(two_ranks, "differentiates", [*EACH, "fsdp,mb=2", "op=2", "pp=2:1f1b,mb=4", "layers=2"])


def test_whole_parameters_in_bf16(two_ranks: RankPool) -> None:
    """They are cast where they are read, as FSDP casts what it gathers."""
    for verdict in two_ranks(habit_programs.verdicts, "scaled", ["fsdp,bf16", "fsdp,fp16,mb=2", "fsdp,bf16:pure"])[0]:
        assert verdict.equal, f"{verdict.strategy}: {verdict.first_difference}"


def test_checkpoints_hold_whole_parameters(two_ranks: RankPool, tmp_path: Path) -> None:
    """What fsdp saves, zero1 and fsdp continue from as a plain loop goes on."""
    losses, state = train_plainly(habit_jobs.scaled, habit_programs.batches(habit_jobs.scaled, STEPS))
    for first, second in [("fsdp", "zero1"), ("zero1", "fsdp"), ("fsdp", "fsdp,offload=optimizer")]:
        folder = str(tmp_path / f"{first}-{second}")
        for found_losses, found in two_ranks(habit_programs.train_on, "scaled", first, second, STEPS, folder):
            assert found_losses == pytest.approx(losses, rel=1e-5), (first, second)
            for name, expected in state.items():
                torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("job", ["lamb", "normed_over_all", "plateau", "fused"])
def test_optimizers_and_schedules_of_every_kind(two_ranks: RankPool, job: str) -> None:
    """Those that look at whole tensors do so through DTensors."""
    check(two_ranks, job, EACH)


@pytest.mark.parametrize(
    ("job", "strategies"),
    [
        ("local_sums", ["zero1", "zero2", "fsdp", "op=2"]),
        ("with_adafactor", ["zero1", "fsdp", "op=2"]),
        ("with_muon", ["zero2"]),  # which computes in bf16, where another order of sums is another update
        ("lamb", ["op=2", "tp=2"]),
        ("normed_over_all", ["pp=2:1f1b"]),
    ],
)
def test_optimizers_that_would_update_parts_otherwise(two_ranks: RankPool, job: str, strategies: list[str]) -> None:
    check(two_ranks, job, ["ddp"])
    for strategy in strategies:
        assert all("optimizer" in str(found) for found in two_ranks(habit_programs.train, job, strategy, 1)), strategy


def test_state_that_forward_moves(two_ranks: RankPool) -> None:
    """Alike on all ranks, where it does not depend on the samples."""
    check(two_ranks, "follows", ["ddp", "zero1", "zero2"])
    check(two_ranks, "counts", EACH)
