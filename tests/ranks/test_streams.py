"""Ranks share a stream: same global batches as in one process, also after a resume on other ranks."""

from itertools import chain
from pathlib import Path

import pytest

import stream_programs as programs
from rank_pool import RankPool
from stream_jobs import SAMPLES

slow = pytest.mark.slow


def losses_of(steps: list[tuple[list[int], float]]) -> list[float]:
    return [loss for _, loss in steps]


def samples_of(steps: list[tuple[list[int], float]]) -> list[list[int]]:
    return [samples for samples, _ in steps]


@slow
@pytest.mark.parametrize("data", ["shuffled", "counted", "sampler"])
def test_a_resumed_run_sees_the_samples_of_the_uninterrupted_one(
    two_ranks: RankPool, one_rank: RankPool, data: str, tmp_path: Path
) -> None:
    """Ragged samples, an uneven end of each epoch, and other ranks, strategy and micro-batches after it."""
    (whole,) = one_rank(programs.seen, data, "single", {"epochs": 2})
    assert [len(samples) for samples in samples_of(whole)] == [6, 6, 6, 6, 6, 6, 6, 3] * 2
    for epoch in (whole[:8], whole[8:]):
        assert sorted(chain.from_iterable(samples_of(epoch))) == list(range(SAMPLES))
    for stop in (3, 8, 11):
        saved = tmp_path / f"{stop}"
        before = two_ranks(programs.seen, data, "zero1,mb=2", {"steps": stop, "save": str(saved)})[0]
        (after,) = one_rank(programs.seen, data, "single", {"epochs": 2, "load": str(saved)})
        assert samples_of(before + after) == samples_of(whole)
        assert losses_of(before + after) == pytest.approx(losses_of(whole), rel=1e-5)


@slow
@pytest.mark.parametrize("strategy", ["fsdp", "tp=2", "pp=2:1f1b,mb=1"])
def test_a_stream_is_the_same_under_every_strategy(two_ranks: RankPool, one_rank: RankPool, strategy: str) -> None:
    (whole,) = one_rank(programs.seen, "shuffled", "single", {"epochs": 1})
    found = two_ranks(programs.seen, "shuffled", strategy, {"epochs": 1})[0]
    assert samples_of(found) == samples_of(whole)
    assert losses_of(found) == pytest.approx(losses_of(whole), rel=1e-5)


@slow
def test_a_stream_that_divides_itself_by_rank_is_read_whole_or_refused(two_ranks: RankPool) -> None:
    assert two_ranks(programs.refusal, "by variable") == ["", ""]
    for reason in two_ranks(programs.refusal, "by group"):
        assert reason.startswith("Ranks read different samples from Job(data=...): it divides its samples by rank")


@slow
def test_all_ranks_stop_where_one_cannot_read_on(two_ranks: RankPool) -> None:
    assert set(two_ranks(programs.refusal, "failing")) == {"Job(data=...) raised ValueError: bad sample (on rank 0)."}
    assert set(two_ranks(programs.refusal, "failing on one rank")) == {
        "Job(data=...) raised ValueError: bad sample (on rank 1)."
    }
