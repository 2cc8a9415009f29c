"""What limited a run, told from each rank's waiting."""

from collections.abc import Iterator

import pytest
import torch

from meshwright.assemble.world import World
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


def test_only_loading_counts_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer's own time is not the loader's."""
    clock = [0.0]
    monkeypatch.setattr("meshwright.runtime.waits.time.perf_counter", lambda: clock[0])

    def slow() -> Iterator[int]:
        for number in range(5):
            clock[0] += 2.0 if number >= 2 else 100.0
            yield number

    watch = WaitWatch(warm_up=2)
    for _ in watch.timed(slow()):
        clock[0] += 6.0
    found = watch.limit(World(device=torch.device("cpu")), 8.0, 0.0, measures_peers=False)
    assert found is not None
    assert (found.cause, found.seconds, found.share) == (DATA, 2.0, 0.25)


def test_too_few_steps() -> None:
    assert WaitWatch(warm_up=2).limit(World(device=torch.device("cpu")), None, 0.0, measures_peers=False) is None
