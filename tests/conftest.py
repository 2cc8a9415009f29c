import os
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from meshwright.environment import CACHE
from meshwright.importing import importing
from rank_pool import RankPool

# Tensors of tests are small. On cores that are busy with other tests, threads that wait for each other take several
# times as long as one. What tests start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Hundreds of processes are started, and each would compile our sources anew; so would the next run with all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests are imported without garbage collections, and those that come later do not look at what was imported."""
    with importing():
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def no_group_left() -> Iterator[None]:
    """A file leaves no process group of this process to the next one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands keep their forecasts in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


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
