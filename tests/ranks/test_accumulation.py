"""When gradients of several micro-batches are reduced: in each where they are sharded, otherwise once a step."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("zero2,sync=last", marks=pytest.mark.thorough), "fsdp,sync=last"]
)
def test_sums_do_not_grow_with_micro_batches(two_ranks: RankPool, strategy: str) -> None:
    whole, cut = (two_ranks(rank_programs.sums_over_ranks, strategy + mb)[0] for mb in ("", ",mb=1"))
    assert whole == cut >= 2


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.thorough), "fsdp"])
def test_sharded_gradients_are_summed_in_each(two_ranks: RankPool, strategy: str) -> None:
    found = [two_ranks(rank_programs.sums_over_ranks, strategy + mb)[0] - 2 for mb in ("", ",mb=2", ",mb=1")]
    assert found == [found[0], 2 * found[0], 4 * found[0]] and found[0]  # besides the loss and the norm


@pytest.mark.parametrize("strategy", ["zero2", "fsdp,sync=last"])
def test_trains_as_plain_pytorch(two_ranks: RankPool, strategy: str) -> None:
    """Four micro-batches of seven samples, which do not divide over two ranks."""
    assert_equal(two_ranks, strategy, samples=7, sizes=(1,))


@pytest.mark.thorough
@pytest.mark.parametrize("sync", ["", ",sync=last"])
@pytest.mark.parametrize(
    "strategy", ["zero2", "fsdp", "fsdp:grad-op", "hsdp=1x2", "hsdp=2x1", "fsdp,bf16", "zero2,bf16"]
)
def test_every_number_of_micro_batches(two_ranks: RankPool, strategy: str, sync: str) -> None:
    """One, two and five micro-batches of ten samples, and two and four of seven."""
    assert_equal(two_ranks, strategy + sync, samples=10, sizes=(5, 3, 1))
    assert_equal(two_ranks, strategy + sync, samples=7, sizes=(2, 1))


def assert_equal(ranks: RankPool, strategy: str, *, samples: int, sizes: tuple[int, ...]) -> None:
    texts = [f"{strategy},mb={size}" for size in sizes]
    for verdict in ranks(rank_programs.verdicts_on, samples, texts)[0]:
        assert verdict.equal, f"{verdict.strategy} of {samples}: {verdict.first_difference}"
