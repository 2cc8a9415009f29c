"""Every strategy on DeepSpeed trains as one process does, on real ranks."""

import pytest

import deepspeed_programs
import rank_programs
from meshwright.strategies.deepspeed.package import is_installed
from rank_pool import RankPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="DeepSpeed is not installed: pip install 'meshwright[deepspeed]'"),
]

THOROUGH = pytest.mark.thorough
STAGES = ["ddp", "zero1", "zero2", "zero3"]
POLICIES = ["", ",bf16", *(pytest.param(policy, marks=THOROUGH) for policy in (",mb=1", ",ac=full", ",fp16"))]


def check(pool: RankPool, job: str, strategies: list[str]) -> None:
    for verdict in pool(rank_programs.verdicts, job, [f"{strategy},engine=deepspeed" for strategy in strategies])[0]:
        assert verdict.equal, f"{verdict.strategy}: {verdict.first_difference}"
        if "bf16" not in verdict.strategy and "fp16" not in verdict.strategy:
            assert verdict.loss_max_rel <= 1e-5, verdict


@pytest.mark.parametrize("policy", POLICIES)
def test_every_stage_under_every_policy(two_ranks: RankPool, policy: str) -> None:
    check(two_ranks, "transformer", [stage + policy for stage in STAGES])


def test_gradients_reduced_in_bf16(two_ranks: RankPool) -> None:
    check(two_ranks, "transformer", [f"{stage},bf16,reduce=bf16" for stage in STAGES[1:]])


def test_offload(two_ranks: RankPool) -> None:
    offloaded = ["zero1,offload=optimizer", "zero2,offload=optimizer,mb=1", "zero3,offload=optimizer"]
    check(two_ranks, "transformer", [*offloaded, "zero3,offload=params", "zero2,bf16,offload=optimizer"])


@pytest.mark.parametrize(
    "job", ["masked", "partial", *(pytest.param(job, marks=THOROUGH) for job in ("convolutions", "uneven", "hf_gpt2"))]
)
def test_what_strategies_get_wrong(two_ranks: RankPool, job: str) -> None:
    """Weights that depend on data; frozen, unused and tied parameters; a batch that does not divide; BatchNorm."""
    check(two_ranks, job, [*STAGES, "zero2,mb=2"])


@THOROUGH
def test_what_is_not_trained_in_low_precision(two_ranks: RankPool) -> None:
    check(two_ranks, "partial", ["zero1,bf16", "zero2,bf16", "zero3,bf16", "ddp,bf16"])


@THOROUGH
def test_weights_that_depend_on_data_in_low_precision(two_ranks: RankPool) -> None:
    """Gradients are put right in the update, which each of DeepSpeed's optimizers does its own way."""
    check(two_ranks, "masked", ["ddp,fp16", "zero1,bf16", "zero2,bf16", "zero3,fp16"])


@THOROUGH
def test_more_ranks(four_ranks: RankPool) -> None:
    check(four_ranks, "transformer", ["zero1", "zero2,mb=1", "zero3"])


def test_pipeline(two_ranks: RankPool) -> None:
    check(two_ranks, "sequential", ["pp=2:1f1b", "pp=2:1f1b,mb=2,ac=full", "pp=2:1f1b,bf16", "pp=2:1f1b,fp16"])
    check(two_ranks, "uneven_sequential", ["pp=2:1f1b,mb=2"])
    check(two_ranks, "transformer", ["zero2"])  # which the pipeline's ranks must not be left behind for


@THOROUGH
def test_pipeline_with_a_data_axis(four_ranks: RankPool) -> None:
    check(four_ranks, "sequential", ["pp=2:1f1b", "pp=2:1f1b,zero1", "pp=2:1f1b,zero1,mb=1,bf16", "pp=4:1f1b"])


def test_a_defect_is_found(two_ranks: RankPool) -> None:
    verdict = two_ranks(rank_programs.verdicts, "transformer", ["zero2,engine=deepspeed"], "scale")[0][0]
    assert not verdict.equal


@pytest.mark.parametrize("strategy", ["zero3", "pp=2:1f1b"])
def test_evaluation(two_ranks: RankPool, strategy: str) -> None:
    ours, theirs = (
        two_ranks(deepspeed_programs.evaluated, "sequential", text)[0]
        for text in ("ddp", f"{strategy},engine=deepspeed")
    )
    assert theirs == pytest.approx(ours, rel=1e-5)


def test_a_stage_without_parameters_of_a_group(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("groups") / "saved"
    found = two_ranks(deepspeed_programs.empty_group, "pp=2:1f1b,engine=deepspeed", str(folder))
    assert [group[1] for group in found] == [0, 2]


def test_a_users_configuration_is_used(two_ranks: RankPool) -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "train_batch_size": 8}
    zero, loss = two_ranks(deepspeed_programs.configured, "zero2,engine=deepspeed", config)[0]
    assert zero["reduce_bucket_size"] == 1000
    assert loss == pytest.approx(two_ranks(deepspeed_programs.losses, "dropping", "zero2", 1)[0][0], rel=1e-5)
