"""One rank's wish to stop reaches all ranks with the loss of the same step."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ddp", "fsdp,mb=1", "tp=2", "pp=2:1f1b"])
def test_all_ranks_see_the_wish_at_the_same_step(two_ranks: RankPool, strategy: str) -> None:
    assert two_ranks(rank_programs.stops, strategy) == [[False, True, False]] * 2
