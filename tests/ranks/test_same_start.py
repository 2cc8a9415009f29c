"""The same seed gives the same initial weights and the same dropout under every strategy and world size."""

import pytest
import torch

import builder_habits
import rank_programs
import tiny_jobs
from meshwright.assemble.world import World
from meshwright.recording.blueprint import build_plainly
from rank_pool import RankPool

pytestmark = pytest.mark.slow
ONE = World(device=torch.device("cpu"))


@pytest.mark.parametrize("job", ["transformer", "convolutions", "hf_gpt2"])
def test_initial_weights(two_ranks: RankPool, four_ranks: RankPool, job: str) -> None:
    torch.manual_seed(11)
    plain = getattr(tiny_jobs, job).model().state_dict()
    cases = [
        (two_ranks, "ddp"),
        (two_ranks, "fsdp"),
        (four_ranks, "zero1"),
        (four_ranks, "fsdp"),
        (four_ranks, "hsdp=2x2"),
    ]
    for pool, strategy in cases:
        for state in pool(rank_programs.initial_weights, job, strategy, 11):
            assert state.keys() == plain.keys()
            for name, value in plain.items():
                assert torch.equal(state[name], value), (strategy, name)


def test_dropout_follows_the_place_in_the_batch(two_ranks: RankPool, four_ranks: RankPool) -> None:
    """Strategies that cut the global batch into the same micro-batches draw the same masks."""
    expected = rank_programs.dropout_losses(ONE, "single,mb=2")
    for pool, strategy in [(two_ranks, "ddp,mb=2"), (four_ranks, "fsdp,mb=2"), (four_ranks, "zero2,mb=2")]:
        for losses in pool(rank_programs.dropout_losses, strategy):
            assert losses == pytest.approx(expected, rel=1e-5)
    assert rank_programs.dropout_losses(ONE, "single") != pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_builder_that_cannot_be_recorded(two_ranks: RankPool, strategy: str) -> None:
    """It runs for real, and every rank trains what it gives plainly."""
    plain = build_plainly(builder_habits.looks_at_values, 11)
    for found in two_ranks(rank_programs.filled, "looks_at_values", strategy):
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("builder", ["from_anywhere", "unseeded_and_looked_at"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp=2"])
def test_numbers_from_anywhere_are_rank_0s(two_ranks: RankPool, builder: str, strategy: str) -> None:
    one, other = two_ranks(rank_programs.filled, builder, strategy)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value), name
