"""Loops as users write them, under every strategy: each is right, which is what plain PyTorch does, or is refused."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loop_models
import loop_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

ROUNDING = 1e-6
SMALL_DTYPES = 0.02
"""How far the change of all weights may be from fp32's, relative to its size, in 16 bits."""

references = cache(loop_programs.run_plainly)
scenes = cache(loop_models.scenes_plainly)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tp=2"])
def test_loops(two_ranks: RankPool, strategy: str) -> None:
    assert_all_equal(two_ranks, strategy)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["fsdp:grad-op", "fsdp:no-shard", "fsdp,sync=last", "zero2,sync=last", "op=2"])
def test_loops_of_further_strategies(two_ranks: RankPool, strategy: str) -> None:
    assert_all_equal(two_ranks, strategy)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp,offload=optimizer", "zero1,offload=optimizer", "fsdp,offload=optimizer"])
def test_loops_with_the_optimizer_on_the_host(two_ranks: RankPool, strategy: str) -> None:
    assert_all_equal(two_ranks, strategy)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["hsdp=2x2", "fsdp=2,tp=2", "zero1=2,tp=2", "ddp=2,op=2"])
def test_loops_on_four_ranks(four_ranks: RankPool, strategy: str) -> None:
    assert_all_equal(four_ranks, strategy)


@pytest.mark.parametrize("strategy", ["fsdp,bf16", "zero1,fp16"])
def test_loops_in_16_bits(two_ranks: RankPool, strategy: str) -> None:
    assert_all_near(two_ranks, strategy)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "strategy",
    ["ddp,bf16", "zero2,bf16", "tp=2,bf16", "ddp,fp16", "zero2,fp16", "fsdp,fp16", "tp=2,fp16", "ddp,fp16:autocast"],
)
def test_further_loops_in_16_bits(two_ranks: RankPool, strategy: str) -> None:
    assert_all_near(two_ranks, strategy)


@pytest.mark.parametrize(("strategy", "other"), [("zero1", "fsdp"), ("fsdp", "ddp")])
def test_several_models(two_ranks: RankPool, strategy: str, other: str) -> None:
    """A GAN, a student with a frozen teacher, an actor with a critic; each model under another strategy."""
    for found in two_ranks(loop_models.scenes, strategy, other):
        for name, models in scenes().items():
            for role, state in models.items():
                assert_close(found[name][role], state, f"{name}: {role}")


@pytest.mark.parametrize(("strategy", "other"), [("fsdp", "tp=2"), ("tp=2", "zero1")])
def test_resumed_under_another_strategy(two_ranks: RankPool, tmp_path: Path, strategy: str, other: str) -> None:
    for state, step, samples in two_ranks(loop_models.resumed, strategy, other, str(tmp_path / "here")):
        assert_close(state, loop_models.resumed_plainly(), f"{strategy} to {other}")
        assert (step, samples) == (2, 24)


@pytest.mark.parametrize("strategy", ["pp=2:1f1b", "fsdp"])
def test_whole_batches(two_ranks: RankPool, strategy: str) -> None:
    """`forward_backward` and PyTorch's clipping, under a pipeline as under any strategy."""
    told, state = loop_models.whole_batches_plainly()
    for found, after in two_ranks(loop_models.whole_batches, strategy):
        assert found == pytest.approx(told, rel=1e-5)
        assert_close(after, state, strategy)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "tp=2", "layers=2"])
def test_whole_batches_of_further_strategies(two_ranks: RankPool, strategy: str) -> None:
    test_whole_batches(two_ranks, strategy)


@pytest.mark.parametrize("strategy", ["ddp,fp16", "fsdp,fp16"])
def test_an_overflow_on_one_rank_is_skipped_on_all(two_ranks: RankPool, strategy: str) -> None:
    for skipped, kept, scale in two_ranks(loop_models.overflow, strategy):
        assert skipped == [False, True, False] and kept and scale == 512


@pytest.mark.parametrize("strategy", ["zero1", "fsdp,fp16"])
def test_a_scaler_of_the_user(two_ranks: RankPool, strategy: str) -> None:
    for state in two_ranks(loop_models.scaled_by_user, strategy):
        assert_close(state, references()["clipped"][0], strategy, 1e-5 if "16" in strategy else ROUNDING)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tp=2"])
def test_a_model_of_transformers(two_ranks: RankPool, strategy: str) -> None:
    pytest.importorskip("transformers")
    made, state = loop_models.generated_plainly()
    for found, after in two_ranks(loop_models.generated, strategy):
        assert found == made
        assert_close(after, state, strategy)


TOLD = {
    "step_of_this_rank_alone": "outside of no_sync()",
    "zeroed_before_reduced": "zero_grad() was called after 1 backward pass",
    "mean_of_uneven_parts": "from 3 to 4 samples in one backward pass",
    "uneven_parts_of_one_sum": "samples in one backward pass",
    "optimizer_of_inner_model": "build it from model.parameters()",
    "unfrozen_too_late": "frozen.weight was frozen when mw.parallelize",
    "samples_divided_over_all_ranks": "were given different samples",
    "coupled_optimizer": "depends on the rest of its tensor",
    "half": "cannot be moved or cast to float16",
    "copied": "A laid-out model cannot be copied",
}
NO_MISTAKE = {
    "ddp": {"zeroed_before_reduced", "optimizer_of_inner_model", "samples_divided_over_all_ranks", "coupled_optimizer"},
    "zero1": {"samples_divided_over_all_ranks", "coupled_optimizer"},
    "fsdp": {
        "step_of_this_rank_alone",  # sharded gradients are reduced in each pass
        "zeroed_before_reduced",
        "samples_divided_over_all_ranks",
        "coupled_optimizer",
    },
    "tp=2": {
        "step_of_this_rank_alone",  # there is one data rank
        "zeroed_before_reduced",
        "mean_of_uneven_parts",
        "uneven_parts_of_one_sum",
        "optimizer_of_inner_model",
    },
}


@pytest.mark.parametrize("strategy", NO_MISTAKE)
def test_mistakes_are_refused_by_name(two_ranks: RankPool, strategy: str) -> None:
    for found in two_ranks(loop_models.mistakes, strategy):
        assert {name for name, told in found.items() if not told} == NO_MISTAKE[strategy]
        for name, told in found.items():
            assert not told or TOLD[name] in told, name


def assert_all_equal(ranks: RankPool, strategy: str) -> None:
    for found in ranks(loop_programs.run_loops, strategy):
        for name, (state, told) in references().items():
            assert not isinstance(found[name], str), f"{name}: {found[name]}"
            assert_close(found[name][0], state, name)
            assert found[name][1] == (None if told is None else pytest.approx(told, rel=1e-5)), name


def assert_all_near(ranks: RankPool, strategy: str) -> None:
    torch.manual_seed(0)
    begin = _flat(loop_programs.Net().state_dict())
    for found in ranks(loop_programs.run_loops, strategy):
        for name, (state, _) in references().items():
            assert not isinstance(found[name], str), f"{name}: {found[name]}"
            wanted, got = _flat(state) - begin, _flat(found[name][0]) - begin
            assert (got - wanted).norm() < SMALL_DTYPES * wanted.norm(), name


def assert_close(state: dict[str, Tensor], reference: dict[str, Tensor], where: str, far: float = ROUNDING) -> None:
    assert state.keys() == reference.keys(), where
    for name, value in reference.items():
        apart = float((state[name] - value).abs().max())
        assert apart <= far, f"{where}: {name} is {apart:.1e} apart"


def _flat(state: dict[str, Any]) -> Tensor:
    return torch.cat([value.flatten() for value in state.values()])
