"""Every choice of shard units trains the same model."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow


def assert_equal(ranks: RankPool, job: str, strategies: list[str]) -> None:
    for verdict in ranks(rank_programs.verdicts, job, strategies)[0]:
        assert verdict.equal, f"{job} under {verdict.strategy}: {verdict.first_difference}"


def test_embedding_and_head_alone(two_ranks: RankPool) -> None:
    assert_equal(two_ranks, "untied", ["fsdp", "fsdp,mb=2", "zero2", "fsdp,ac=full"])


@pytest.mark.thorough
def test_embedding_and_head_alone_on_four_ranks(four_ranks: RankPool) -> None:
    policies = ["fsdp,bf16", "fsdp:grad-op", "zero1", "zero2,bf16", "fsdp,offload=params", "fsdp,compile"]
    assert_equal(four_ranks, "untied", [*policies, "hsdp=2x2", "tp=2,fsdp", "pp=2:1f1b,fsdp", "op=2,fsdp"])


@pytest.mark.parametrize("job", ["finer_units", "units_by_size"])
def test_chosen_units(two_ranks: RankPool, job: str) -> None:
    assert_equal(two_ranks, job, ["fsdp", "zero2,mb=2"])


@pytest.mark.thorough
@pytest.mark.parametrize("job", ["finer_units", "units_by_size"])
def test_chosen_units_on_four_ranks(four_ranks: RankPool, job: str) -> None:
    assert_equal(four_ranks, job, ["fsdp,bf16,ac=full", "fsdp,compile", "hsdp=2x2", "tp=2,fsdp", "pp=2:1f1b,fsdp"])
