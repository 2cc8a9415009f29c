"""Sharded tensors come back whole, whichever of them are gathered in one collective."""

import pytest

import rank_programs
from meshwright.strategies.gather_whole import BATCH
from rank_pool import RankPool


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 1000, BATCH], ids=["alone", "some", "all"])
def test_every_layout(four_ranks: RankPool, limit: int) -> None:
    assert four_ranks(rank_programs.gathered_whole, limit) == [[]] * 4
