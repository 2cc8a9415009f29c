"""Gradient accumulation communicates once a step."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op"])
def test_sums_do_not_grow_with_micro_batches(two_ranks: RankPool, strategy: str) -> None:
    whole, cut = (two_ranks(rank_programs.sums_over_ranks, strategy + mb)[0] for mb in ("", ",mb=1"))
    assert whole == cut >= 2
