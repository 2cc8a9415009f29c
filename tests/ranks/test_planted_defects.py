"""`verify` must be able to fail: planted defects are found, and the verdict says where they lie."""

import pytest

from planted_defects import PLANTED, verdict_on
from rank_pool import RankPool

USUAL = {
    "gradients scaled by ranks",
    "a dropped micro-batch",
    "statistics of one rank",
    "a buffer not filled",
    "the norm of one rank",
    "a stale copy",
    "a permuted cut",
    "betas altered on one rank",
    "no synchronisation, in bf16",
    "a sample seen twice, reduced in bf16",
}
"""One of each kind; the rest is of the kinds of these."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in PLANTED]
)
def test_a_planted_defect_is_found_and_named(two_ranks: RankPool, name: str) -> None:
    verdict = two_ranks(verdict_on, name)[0]
    assert verdict.status == "differs"
    for words in PLANTED[name].named:
        assert words in verdict.first_difference
