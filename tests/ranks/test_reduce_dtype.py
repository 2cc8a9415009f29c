"""`reduce=bf16`: gradients are rounded to bf16 and summed over ranks in it, and are fp32 before and after."""

import pytest
import torch

import rank_programs
from meshwright.verify.evidence import ROUNDING
from rank_pool import RankPool

pytestmark = pytest.mark.slow
LOW = ",bf16,reduce=bf16"


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero2", "fsdp", "zero1,mb=1", "fsdp:grad-op,mb=1", "zero2,mb=1,sync=last"]
)
def test_gradients_differ_by_the_rounding_of_their_sum(two_ranks: RankPool, strategy: str) -> None:
    full, low = (two_ranks(rank_programs.first_gradients, strategy + how)[0] for how in (",bf16", LOW))
    assert full.keys() == low.keys() and full
    for name, exact in full.items():
        assert low[name].dtype == torch.float32
        off = float((low[name] - exact).norm() / exact.norm())
        assert off < 2 * ROUNDING["bf16"], name
    assert any(not torch.equal(low[name], exact) for name, exact in full.items())


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_one_micro_batch_s_sums_are_numbers_of_bf16(two_ranks: RankPool, strategy: str) -> None:
    low = two_ranks(rank_programs.first_gradients, strategy + LOW)[0]
    assert all(torch.equal(gradient.bfloat16().float(), gradient) for gradient in low.values())


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_micro_batches_are_added_up_in_fp32(two_ranks: RankPool, strategy: str) -> None:
    low = two_ranks(rank_programs.first_gradients, f"{strategy},mb=1{LOW}")[0]
    assert any(not torch.equal(gradient.bfloat16().float(), gradient) for gradient in low.values())


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp,mb=1", "zero2", "fsdp"),
        *(
            pytest.param(text, marks=pytest.mark.thorough)
            for text in ("ddp", "zero1", "zero2,mb=1,sync=last", "fsdp:grad-op,mb=1", "hsdp=1x2", "hsdp=2x1")
        ),
    ],
)
def test_trains_as_one_process(two_ranks: RankPool, strategy: str) -> None:
    assert_equal(two_ranks, strategy + LOW)


@pytest.mark.parametrize("strategy", ["ddp", "zero2,ac=full", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_with_autocast(two_ranks: RankPool, strategy: str) -> None:
    assert_equal(two_ranks, strategy + ",bf16:autocast,reduce=bf16")


@pytest.mark.parametrize("strategy", ["ddp,pp=2:1f1b", pytest.param("zero1,pp=2:1f1b", marks=pytest.mark.thorough)])
def test_in_the_stages_of_a_pipeline(four_ranks: RankPool, strategy: str) -> None:
    assert_equal(four_ranks, strategy + LOW)


def assert_equal(ranks: RankPool, strategy: str) -> None:
    (verdict,) = ranks(rank_programs.verdicts_on, 8, [strategy])[0]
    assert verdict.equal, f"{verdict.strategy}: {verdict.first_difference}"
