"""`fp8` on ranks trains as `fp8` in one process does, within the bounds of its roundings."""

import pytest

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "strategies",
    [
        ["ddp,fp8", "fsdp,fp8", "tp=2,fp8"],
        pytest.param(["zero1,fp8", "zero2,fp8,mb=2", "pp=2,fp8", "fsdp,fp8,ac=full"], marks=pytest.mark.thorough),
        pytest.param(["fsdp:grad-op,fp8", "hsdp=1x2,fp8", "ddp,fp8:pure", "layers=2,fp8"], marks=pytest.mark.thorough),
        pytest.param(["tp=2,fp8,ac=full", "tp=2,fp8,ac=selective", "tp=2,fp8:pure"], marks=pytest.mark.thorough),
    ],
)
def test_trains_as_one_process(two_ranks: RankPool, strategies: list[str]) -> None:
    for verdict in two_ranks(rank_programs.verdicts_in_float8, strategies)[0]:
        assert verdict.equal, f"{verdict.strategy}: {verdict.first_difference}"
        assert verdict.precision == "fp8"


def test_the_bounds_of_fp8_still_find_a_defect(two_ranks: RankPool) -> None:
    (verdict,) = two_ranks(rank_programs.verdicts_in_float8, ["ddp,fp8"], "scale")[0]
    assert not verdict.equal


def test_parts_multiply_in_float8_by_rules_and_in_programs(two_ranks: RankPool) -> None:
    rules, none = two_ranks(rank_programs.float8_in_parts, "tp=2,fp8", False)[0]
    programs, products = two_ranks(rank_programs.float8_in_parts, "tp=2,fp8", True)[0]
    low, _ = two_ranks(rank_programs.float8_in_parts, "tp=2,bf16", True)[0]
    assert (none, products) == ([0, 0], [7, 7])
    assert rules == programs
    assert programs != low
    assert programs == pytest.approx(low, rel=2.0**-6)
