"""The heart: every strategy, under every policy, trains as one process does."""

import pytest
import torch

import rank_programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

FOUR = ["ddp", "zero1", "zero2", "fsdp", "fsdp:grad-op", "fsdp:no-shard", "hsdp=2x2"]
POLICIES = ["", ",mb=1", ",ac=full", ",ac=selective", ",offload=optimizer", ",bf16", ",fp16", ",bf16:pure"]
ENGINES = ["ddp", "zero2", "fsdp"]
"""One strategy of each kind of engine."""
KINDS = [*ENGINES, "hsdp=2x2"]
"""Those, and a mesh of two dims."""
ALIKE = [strategy for strategy in FOUR if strategy not in KINDS]
"""The others, of the same engines."""
THOROUGH = pytest.mark.thorough


def check(pool: RankPool, job: str, strategies: list[str]) -> None:
    for verdict in pool(rank_programs.verdicts, job, strategies)[0]:
        assert verdict.equal, f"{verdict.strategy}: {verdict.first_difference}"
        if "bf16" not in verdict.strategy and "fp16" not in verdict.strategy:
            assert verdict.loss_max_rel <= 1e-5, verdict


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategies", [KINDS, pytest.param(ALIKE, marks=THOROUGH)], ids=["kinds", "alike"])
def test_every_strategy_under_every_policy(four_ranks: RankPool, strategies: list[str], policy: str) -> None:
    check(four_ranks, "transformer", [strategy + policy for strategy in strategies])


@pytest.mark.parametrize(
    "job", ["convolutions", *(pytest.param(j, marks=THOROUGH) for j in ("transformer", "hf_gpt2"))]
)
def test_every_strategy(four_ranks: RankPool, job: str) -> None:
    check(four_ranks, job, FOUR if job != "transformer" else ALIKE)


@THOROUGH
@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("job", ["convolutions", "hf_gpt2"])
def test_every_policy_on_other_models(two_ranks: RankPool, job: str, policy: str) -> None:
    check(two_ranks, job, [strategy + policy for strategy in ENGINES])


def test_dropout_is_on_where_one_process_can_draw_the_masks(four_ranks: RankPool) -> None:
    strategies = ["ddp", "fsdp,mb=1,ac=full", "fsdp,bf16", "tp=2,ddp"]
    *on, divided = four_ranks(rank_programs.verdicts, "transformer", strategies)[0]
    assert all(verdict.equal and "with dropout" in verdict.reference and verdict.note is None for verdict in on), on
    (uneven,) = four_ranks(rank_programs.verdicts, "uneven", ["ddp"])[0]
    assert all(one.equal and "dropout was off" in one.note for one in (divided, uneven))


def test_batch_norm_over_micro_batches(four_ranks: RankPool) -> None:
    """Which samples meet in a statistic depends on how a strategy cuts the batch."""
    check(four_ranks, "convolutions", ["zero1,mb=1", "fsdp:no-shard,mb=1", "hsdp=2x2,mb=1"])


@pytest.mark.parametrize("job", ["masked", "partial", "uneven"])
@pytest.mark.parametrize(
    "strategies",
    [
        ["ddp", "zero2,mb=1", "fsdp,mb=1"],
        pytest.param(["zero1", "zero2", "fsdp", "ddp,mb=1", "fsdp,bf16"], marks=THOROUGH),
    ],
    ids=["kinds", "alike"],
)
def test_what_strategies_get_wrong(four_ranks: RankPool, strategies: list[str], job: str) -> None:
    """Weights that depend on data; frozen, unused and tied parameters; a batch that does not divide."""
    check(four_ranks, job, strategies)


def test_parameter_without_dims(four_ranks: RankPool) -> None:
    check(four_ranks, "plain", ["ddp", "zero1", "zero2", "fsdp", "zero1,bf16", "fsdp,bf16", "zero2,offload=optimizer"])


def test_policies_together(two_ranks: RankPool) -> None:
    check(two_ranks, "transformer", ["fsdp,bf16,ac=full,mb=2", "zero2,bf16,ac=selective,mb=1,offload=optimizer"])
    check(two_ranks, "convolutions", ["ddp,bf16,ac=full,mb=2", "hsdp=1x2,ac=full,mb=1,offload=optimizer"])


def test_a_loss_inside_the_model_is_in_fp32(one_rank: RankPool, two_ranks: RankPool) -> None:
    """A mean of a few losses that were rounded to bf16's 8 bits would fit in fp16's 11."""
    (expected,) = one_rank(rank_programs.evaluated, "own_loss", ["single,bf16"])[0]
    axes = ["ddp", "zero2", "fsdp", "tp=2", "op=2", "pp=2:1f1b"]
    strategies = [*(f"{axis},bf16" for axis in axes), "ddp,bf16,ac=full", "tp=2,bf16,ac=full"]
    for strategy, found in zip(strategies, two_ranks(rank_programs.evaluated, "own_loss", strategies)[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-3), strategy
        assert torch.tensor(found).half().item() != found, strategy


def test_autocast(one_rank: RankPool, two_ranks: RankPool) -> None:
    (expected,) = one_rank(rank_programs.evaluated, "own_loss", ["single,bf16:autocast"])[0]
    axes = ["ddp", "zero1", "zero2", "fsdp", "hsdp=2x1", "pp=2:1f1b", "layers=2"]
    strategies = [f"{axis},bf16:autocast" for axis in axes] + ["fsdp,bf16:autocast,ac=full"]
    for strategy, found in zip(strategies, two_ranks(rank_programs.evaluated, "own_loss", strategies)[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5), strategy


def test_parameters_in_host_memory(two_ranks: RankPool) -> None:
    check(two_ranks, "transformer", ["fsdp,offload=params", "hsdp=2x1,offload=params,mb=1", "fsdp,bf16,offload=params"])


def test_compiled(two_ranks: RankPool) -> None:
    check(two_ranks, "transformer", ["ddp,compile", "fsdp,compile", "zero2,compile,ac=full"])
