"""When gradients of several micro-batches are reduced: in each where they are sharded, otherwise once a step."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ddp", "zero2,sync=last", "fsdp,sync=last"])
def test_sums_do_not_grow_with_micro_batches(two_ranks: RankPool, strategy: str) -> None:
    whole, cut = (two_ranks(rank_programs.sums_over_ranks, strategy + mb)[0] for mb in ("", ",mb=1"))
    assert whole == cut >= 2


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_sharded_gradients_are_summed_in_each(two_ranks: RankPool, strategy: str) -> None:
    found = [two_ranks(rank_programs.sums_over_ranks, strategy + mb)[0] - 2 for mb in ("", ",mb=2", ",mb=1")]
    assert found == [found[0], 2 * found[0], 4 * found[0]] and found[0]  # besides the loss and the norm


@pytest.mark.parametrize("sync", ["", ",sync=last"])
@pytest.mark.parametrize(
    "strategy",
    [
        "zero2",
        "fsdp",
        *(pytest.param(s, marks=pytest.mark.thorough) for s in ("fsdp:grad-op", "fsdp,bf16", "zero2,bf16")),
    ],
)
def test_trains_as_plain_pytorch(two_ranks: RankPool, strategy: str, sync: str) -> None:
    """One, two and five micro-batches of ten samples, and two and four of seven, which do not divide."""
    for samples, sizes in ((10, (5, 3, 1)), (7, (2, 1))):
        texts = [f"{strategy},mb={size}{sync}" for size in sizes]
        for verdict in two_ranks(rank_programs.verdicts_on, samples, texts)[0]:
            assert verdict.equal, f"{verdict.strategy} of {samples}: {verdict.first_difference}"
