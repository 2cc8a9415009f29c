from collections.abc import Iterator

import pytest

from rank_pool import RankPool


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """A process in which nothing else has run."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
