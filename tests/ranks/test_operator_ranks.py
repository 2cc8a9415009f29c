"""Operators divided over real ranks compute what the whole ones do, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import operator_programs as programs
from meshwright.strategies.operator import rules
from rank_pool import RankPool

pytestmark = pytest.mark.slow

MODELS = list(programs.INPUTS)


def check(found: list[dict[str, float]], limit: float = 1e-12) -> None:
    for rank, differences in enumerate(found):
        wrong = {name: value for name, value in differences.items() if not value <= limit}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("make", MODELS)
def test_two_ranks_equal_one(two_ranks: RankPool, make: Callable[[], nn.Module]) -> None:
    check(two_ranks(programs.differences, make))


@pytest.mark.parametrize("make", MODELS)
def test_four_ranks_equal_one(four_ranks: RankPool, make: Callable[[], nn.Module]) -> None:
    check(four_ranks(programs.differences, make))


@pytest.mark.parametrize("change", ["", pytest.param("compile", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("make", MODELS)
def test_programs_equal_one_rank(two_ranks: RankPool, make: Callable[[], nn.Module], change: str) -> None:
    check(two_ranks(programs.program_differences, make, change))


def test_a_program_sums_the_gradient_of_a_tensor_once(two_ranks: RankPool) -> None:
    assert two_ranks(programs.message_counts, False)[0] == [3, 3]
    assert two_ranks(programs.message_counts, True)[0] == [3, 1]


@pytest.mark.parametrize("change", ["ac=full", "ac=selective", pytest.param("compile", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("make", [programs.Residual, programs.Tied, programs.Encoder])
def test_under_policies(two_ranks: RankPool, make: Callable[[], nn.Module], change: str) -> None:
    check(two_ranks(programs.differences, make, change))


@pytest.mark.parametrize("make", [programs.Residual, programs.Encoder, programs.transposed_linears])
def test_bf16_copies_of_the_parameters(two_ranks: RankPool, make: Callable[[], nn.Module]) -> None:
    check(two_ranks(programs.differences, make, "bf16"), limit=2e-2)


def test_channels_last_stays(two_ranks: RankPool) -> None:
    check(two_ranks(programs.differences, programs.Residual, "channels_last"))
    assert all(two_ranks(programs.output_is_channels_last))


@pytest.mark.parametrize("make", MODELS)
def test_under_fsdp(four_ranks: RankPool, make: Callable[[], nn.Module]) -> None:
    check(four_ranks(programs.sharded_differences, make))


@pytest.mark.parametrize("defect", programs.DEFECTS)
def test_a_defect_is_seen(two_ranks: RankPool, defect: str) -> None:
    """The comparison can fail: without one of its collectives the result differs."""
    with pytest.raises(AssertionError, match="rank 0"):
        check(two_ranks(programs.defective_differences, defect))


def test_each_rank_holds_its_share(two_ranks: RankPool, four_ranks: RankPool) -> None:
    assert two_ranks(programs.parameter_share, programs.cnn) == pytest.approx([1 / 2] * 2, rel=0.02)
    assert four_ranks(programs.parameter_share, programs.cnn) == pytest.approx([1 / 4] * 4, rel=0.02)


def test_inference_does_not_hand_parts_to_a_fused_kernel(two_ranks: RankPool) -> None:
    assert max(two_ranks(programs.inference_difference)) < 1e-6


@pytest.mark.parametrize("entry", [-1, programs.WORDS])
def test_an_entry_that_is_not_there_fails_on_every_rank(two_ranks: RankPool, entry: int) -> None:
    assert two_ranks(programs.out_of_range, entry) == ["IndexError"] * 2
    assert two_ranks(programs.out_of_range, programs.WORDS - 1) == ["none"] * 2


def test_ranks_drop_otherwise_in_their_heads_and_alike_after(two_ranks: RankPool) -> None:
    (weights, after), (same_weights, same_after) = two_ranks(programs.dropout_draws)
    assert torch.equal(weights, same_weights)
    assert torch.equal(after, same_after)
    first, second = (weights[:, heads] == 0 for heads in (slice(0, 2), slice(2, 4)))
    assert 0.2 < first.float().mean() < 0.8
    assert not torch.equal(first, second)


def test_nothing_is_sent_for_an_input_without_gradient(two_ranks: RankPool) -> None:
    assert two_ranks(programs.messages, True) == [(1, 1)] * 2
    assert two_ranks(programs.messages, False) == [(1, 0)] * 2


def test_defects_name_what_the_module_uses() -> None:
    assert all(hasattr(rules, name) for name in programs.DEFECTS)
