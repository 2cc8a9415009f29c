"""What limited a run, told from each rank's waiting."""

import time
from collections.abc import Iterator

import pytest

from meshwright.runtime.waits import COMPUTE, DATA, PEERS, RANK, WaitWatch, find_limit


@pytest.mark.parametrize(
    ("data", "peers", "cause", "rank"),
    [
        ([0.6, 0.1], [0.0, 0.5], DATA, 0),  # rank 1 waits for rank 0, which waits for its data
        ([0.0, 0.0], [0.4, 0.5], PEERS, None),
        ([0.0, 0.0], [0.05, 0.5], RANK, 0),
        ([0.05, 0.05], [0.1, 0.1], COMPUTE, None),
        ([0.05], [0.0], COMPUTE, None),
    ],
)
def test_find_limit(data: list[float], peers: list[float], cause: str, rank: int | None) -> None:
    found = find_limit(1.0, data, peers)
    assert (found.cause, found.rank) == (cause, rank)
    assert found.sentence().endswith("of each step.")


def test_shares() -> None:
    assert find_limit(0.5, [0.25], [0.0]).share == 0.5
    assert "rank 0 waited for its batches 50% of each step" in find_limit(0.5, [0.25], [0.0]).sentence()


def test_only_loading_counts_as_data() -> None:
    """The consumer's own time is not the loader's."""

    def slow() -> Iterator[int]:
        for number in range(4):
            time.sleep(0.02 if number >= 2 else 0.0)
            yield number

    watch = WaitWatch(warm_up=2)
    for _ in watch.timed(slow()):
        time.sleep(0.001)
    waits = watch._waits
    assert len(waits) == 4
    assert min(waits[2:]) >= 0.02 > max(waits[:2])
