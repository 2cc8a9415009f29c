"""Pipelines and layer-wise placement, alone and with every data strategy, train as one process does."""

import pytest
import torch

import pipeline_models
import pipeline_programs as programs
from rank_pool import RankPool

pytestmark = pytest.mark.slow

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]


def check(pool: RankPool, job: str, *strategies: str) -> None:
    for verdict in pool(programs.verdicts, job, list(strategies))[0]:
        assert verdict.equal, f"{job} under {verdict.strategy}: {verdict.first_difference}"
        if "fp16" not in verdict.strategy and "bf16" not in verdict.strategy:
            assert verdict.loss_max_rel <= 1e-5, verdict


def test_every_schedule(two_ranks: RankPool) -> None:
    check(two_ranks, "tied", *(f"pp=2:{schedule}" for schedule in SCHEDULES), "layers=2", "layers=2,mb=2")


@pytest.mark.parametrize(
    "job",
    [
        "glued",
        "biased",
        "skipping",
        "repeating",
        "translating",
        "frozen",
        "frozen_foot",
        "listening",
        "sharing",
        "collecting",
        "handing",
        "routing",
        "doubling",
        "reading_changed",
        "changing_batch",
    ],
)
def test_every_model(two_ranks: RankPool, job: str) -> None:
    """What cutting can get wrong, under a plain schedule and one that splits the backward pass over four stages."""
    check(two_ranks, job, "pp=2:1f1b", "pp=2:zbv")


def test_a_buffer_that_one_stage_changes(two_ranks: RankPool) -> None:
    check(two_ranks, "averaging_blocks", "layers=2")


def test_policies(two_ranks: RankPool) -> None:
    fp32 = ["pp=2:1f1b,ac=full", "pp=2:zb,ac=full", "pp=2:1f1b,mb=1", "pp=2:interleaved,ac=selective,offload=optimizer"]
    check(two_ranks, "tied", *fp32)
    check(two_ranks, "tied", "pp=2:1f1b,fp16", "pp=2:zbv,bf16", "pp=2:gpipe,bf16:pure")
    check(two_ranks, "tables", "pp=2:1f1b,bf16", "layers=2,bf16,ac=full")


@pytest.mark.thorough
def test_compiled(two_ranks: RankPool) -> None:
    check(two_ranks, "tied", "pp=2:1f1b,compile", "pp=2:zb,compile,bf16", "layers=2,compile,ac=selective")


@pytest.mark.parametrize("job", ["masked", "uneven"])
def test_what_pipelines_get_wrong(two_ranks: RankPool, job: str) -> None:
    """A loss whose weight depends on the data; a batch of seven."""
    check(two_ranks, job, "pp=2:1f1b", "pp=2:interleaved", "pp=2:zbv", "layers=2")


def test_every_data_strategy(four_ranks: RankPool) -> None:
    data = ["ddp", "zero1", "zero2", "fsdp", "hsdp=2x1", "hsdp=1x2", "fsdp:grad-op,sync=last", "zero2,sync=last"]
    check(four_ranks, "tied", *(f"pp=2:1f1b,{name}" for name in data), "pp=4:1f1b", "layers=2,fsdp")


def test_every_way_of_backward_with_data_strategies(four_ranks: RankPool) -> None:
    check(four_ranks, "tied", "pp=2:interleaved,fsdp", "pp=2:zb,fsdp", "pp=2:zb,ddp", "pp=2:zbv,ddp", "pp=2:zbv,zero2")
    check(four_ranks, "tied", "pp=2:zb,fsdp,sync=last")


def test_what_hybrids_get_wrong(four_ranks: RankPool) -> None:
    check(four_ranks, "frozen", "pp=2:zbv,zero1")
    check(four_ranks, "uneven", "pp=2:1f1b,fsdp")
    check(four_ranks, "masked", "pp=2:1f1b,zero2")


@pytest.mark.thorough
def test_what_more_hybrids_get_wrong(four_ranks: RankPool) -> None:
    check(four_ranks, "frozen", "pp=2:1f1b,ddp")
    check(four_ranks, "uneven", "pp=2:zbv,ddp")
    check(four_ranks, "repeating", "pp=2:1f1b,fsdp")
    check(four_ranks, "frozen_foot", "pp=2:1f1b,fsdp", "pp=2:1f1b,zero1,offload=optimizer")
    check(four_ranks, "tied", "pp=2:1f1b,fsdp,fp16,ac=full")


def test_batch_norm_under_layers(two_ranks: RankPool, four_ranks: RankPool) -> None:
    """Also without weights of its own, and where data ranks have unlike numbers of samples."""
    check(two_ranks, "with_batch_norms", "layers=2,ac=full")
    check(two_ranks, "with_bare_batch_norms", "layers=2")
    check(four_ranks, "odd_batch_norms", "layers=2,ddp")


def test_operators(two_ranks: RankPool, four_ranks: RankPool) -> None:
    check(two_ranks, "convolutions", "op=2", "op=2,mb=1,ac=full")
    check(four_ranks, "convolutions", "op=2,ddp", "op=2,pp=2:1f1b")
    check(four_ranks, "tied", "op=2,pp=2:zb")


@pytest.mark.parametrize("strategy", ["pp=2:1f1b", "pp=2:zbv", "layers=2"])
def test_batches_of_other_sizes(two_ranks: RankPool, strategy: str) -> None:
    """The last ones of an epoch: fewer samples than micro-batches, one sample, and a full batch again."""
    for found, expected in two_ranks(programs.steps_of_sizes, "tied", strategy, [8, 3, 1, 5, 8]):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=2e-5)


def test_batches_of_other_sizes_over_data_ranks(four_ranks: RankPool) -> None:
    """One data rank has nothing but a stand-in."""
    for found, expected in four_ranks(programs.steps_of_sizes, "masked", "pp=2:1f1b,fsdp", [8, 1, 3]):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("strategy", ["pp=2:1f1b", "pp=2:interleaved", "pp=2:zbv", "layers=2"])
def test_evaluate(two_ranks: RankPool, strategy: str) -> None:
    for found, expected in two_ranks(programs.evaluations, "tied", strategy, [8, 3, 1]):
        assert found == pytest.approx(expected, rel=1e-5)


def test_evaluate_over_data_ranks(four_ranks: RankPool) -> None:
    for found, expected in four_ranks(programs.evaluations, "masked", "pp=2:zbv,fsdp", [8, 3]):
        assert found == pytest.approx(expected, rel=1e-5)


def test_all_ranks_are_told_the_same(four_ranks: RankPool) -> None:
    """Loss, norm and state, in the unsplit model's names."""
    for strategy in ("pp=2:interleaved,fsdp", "op=2,pp=2:1f1b"):
        answers = four_ranks(programs.results_and_state, "tied", strategy)
        for results, state, names in answers:
            assert results == answers[0][0]
            assert list(state) != [] and set(state) == set(names)
            assert all(torch.equal(state[name], answers[0][1][name]) for name in names)


def test_each_rank_holds_its_stages(two_ranks: RankPool) -> None:
    whole = sum(4 * p.numel() for p in pipeline_models.Trunk().parameters())
    for strategy in ("pp=2:1f1b", "pp=2:zbv"):
        held = two_ranks(programs.held_parameters, "trunk", strategy)
        assert sum(held) == whole
        assert max(held) < 0.6 * whole


def test_the_backward_pass_is_split_where_that_is_right(two_ranks: RankPool) -> None:
    """PyTorch loses the gradient of a second embedding that is sent on as it is."""
    answers = two_ranks(programs.splits, "trunk", "pp=2:zbv")
    assert answers == [{0: None, 3: True}, {1: True, 2: True}]
    answers = two_ranks(programs.splits, "translating", "pp=2:zbv")
    assert answers[1][1] is False and answers[1][2] is True


@pytest.mark.parametrize(
    ("defect", "job", "strategy", "shows"),
    [
        ("unshared", "tied", "pp=2:1f1b", "places"),
        ("unshared", "tied", "pp=2:zbv", "places"),
        ("unlearned", "trunk", "pp=2:1f1b", "enter.weight"),
        ("unlearned", "trunk", "pp=2:gpipe", "grad_norm at step 1"),
        ("norm", "trunk", "pp=2:1f1b", "grad_norm at step 1"),
        ("norm", "masked", "pp=2:interleaved", "grad_norm at step 1"),
    ],
)
def test_a_planted_defect_is_found(two_ranks: RankPool, defect: str, job: str, strategy: str, shows: str) -> None:
    (verdict,) = two_ranks(programs.verdicts, job, [strategy], defect)[0]
    assert not verdict.equal
    assert shows in verdict.first_difference


def test_a_tied_gradient_that_is_not_summed_is_found_in_a_hybrid(four_ranks: RankPool) -> None:
    (verdict,) = four_ranks(programs.verdicts, "tied", ["pp=2:1f1b,fsdp"], "unshared")[0]
    assert not verdict.equal
    assert "places" in verdict.first_difference


def test_another_number_of_calls_is_an_error_on_all_ranks(two_ranks: RankPool) -> None:
    """Before anything is sent, so nobody waits."""
    for message in two_ranks(programs.fickle_error):
        assert "makes 5 calls for a batch of these shapes and 6 for other shapes" in message
