"""`verify` must be able to fail: planted defects are found and named."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_wrong_scale(two_ranks: RankPool, strategy: str) -> None:
    """Adam does not feel the scale of gradients, but they are compared before it."""
    (verdict,) = two_ranks(rank_programs.verdicts, "masked", [strategy], "scale")[0]
    assert not verdict.equal
    assert "it is 2 times the right one" in verdict.first_difference
    assert "grad_norm at step 1" in verdict.first_difference
    assert verdict.grad_norm_max_rel == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "ddp,mb=1"])
def test_missing_synchronisation(two_ranks: RankPool, strategy: str) -> None:
    (verdict,) = two_ranks(rank_programs.verdicts, "transformer", [strategy], "synchronise")[0]
    assert not verdict.equal
    assert verdict.first_difference.startswith("gradient of token.weight")
    assert "token.weight: rank 1 holds another copy than rank 0 after step 1" in verdict.first_difference


@pytest.mark.parametrize("defect", ["synchronise", "update"])
@pytest.mark.parametrize("job", ["transformer", "convolutions"])
def test_defects_show_in_low_precision(four_ranks: RankPool, job: str, defect: str) -> None:
    (verdict,) = four_ranks(rank_programs.verdicts, job, ["ddp,bf16"], defect)[0]
    assert not verdict.equal
    assert "after step 1" in verdict.first_difference


def test_untied_weight(two_ranks: RankPool) -> None:
    (verdict,) = two_ranks(rank_programs.verdicts, "transformer", ["ddp"], "untie")[0]
    assert not verdict.equal
    assert verdict.first_difference.startswith(("gradient of token.weight", "gradient of head.weight"))
