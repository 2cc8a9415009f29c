"""Evaluation, epochs, averages, groups and run-time loss weights give what a plain PyTorch script gives."""

from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

from meshwright.assemble.world import alone
from meshwright.checkpoint.exports import export
from meshwright.describe.model import describe
from meshwright.facts.model import ModelFacts
from rank_pool import RankPool
from script_jobs import JOBS, MEASURED, PlainRun, train_plainly
from script_programs import averages, evaluations, failure, losses, measured, refusal, steps_until_asked, train_script

pytestmark = pytest.mark.slow

EPOCHS = 2
STRATEGIES = ["ddp,mb=1", "zero1", "tp=2,fsdp", "pp=2:1f1b,fsdp"]
ALIKE = ["ddp", "fsdp", "zero2", "hsdp=2x2", "op=2,ddp", "layers=2,zero1", "ddp,offload=optimizer", "pp=2:gpipe"]
THOROUGH = [pytest.param(strategy, marks=pytest.mark.thorough) for strategy in ALIKE]


@cache
def facts() -> ModelFacts:
    return describe(JOBS["trained"]())


@cache
def plain(averaged: bool) -> PlainRun:
    return train_plainly(EPOCHS, averaged=averaged)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def compare(out: Path, weights: dict[str, torch.Tensor], expected: PlainRun) -> None:
    close(losses(out), expected.losses)
    told = evaluations(out)
    assert [record["step"] for record in told] == [record["step"] for record in expected.evaluations]
    assert not any(record["final"] for record in told)
    for found, record in zip(told, expected.evaluations, strict=True):
        close([found[name] for name in record], list(record.values()))
    close({name: weights[name] for name in expected.weights}, expected.weights)
    close(averages(out), {name: expected.averages[name] for name in averages(out)})


@pytest.mark.parametrize("strategy", [*STRATEGIES, *THOROUGH])
def test_a_script_and_its_job(four_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    job = "averaged" if strategy in ("zero1", "pp=2:1f1b,fsdp") else "trained"
    ranks = four_ranks(train_script, job, facts(), strategy, str(tmp_path / "run"), None, EPOCHS)
    for trained in ranks:
        assert (trained.summary.steps, trained.summary.epochs) == (8, EPOCHS)
        assert trained.summary.evaluation == ranks[0].summary.evaluation
    compare(tmp_path / "run", ranks[0].weights, plain(job == "averaged"))


@pytest.mark.parametrize(
    ("first", "then"), [pytest.param("fsdp", "zero1", marks=pytest.mark.thorough), ("tp=2,ddp", "pp=2:1f1b")]
)
def test_killed_and_resumed_elsewhere(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, first: str, then: str
) -> None:
    """In the middle of an epoch, on another number of ranks: records, weights and averages are those of one run.

    What the first run did after its checkpoint of step 5 is lost, as if it had been killed.
    """
    out = tmp_path / "run"
    four_ranks(train_script, "averaged", facts(), first, str(out), 7, None, 5)
    assert [record["final"] for record in evaluations(out)] == [False, False, False, True]
    rmtree(out / "checkpoints" / "step-00000007")
    ranks = two_ranks(train_script, "averaged", facts(), then, str(out), None, EPOCHS, 0, True)
    assert ranks[0].summary.resumed_at == 5
    compare(out, ranks[0].weights, plain(averaged=True))

    export(out, tmp_path / "averaged", to="torch", ema=True)
    written = torch.load(tmp_path / "averaged" / "model.pt", weights_only=True)
    close({name: written[name] for name in plain(averaged=True).averages}, plain(averaged=True).averages)


@pytest.mark.parametrize(
    ("job", "strategies"),
    [
        ("divided head", ["tp=2,loss=pieced", "fsdp,loss=pieced", "ddp,bf16"]),
        ("contrastive", ["ddp", "fsdp", "ddp,mb=1"]),
    ],
)
def test_metrics_of_outputs_that_are_not_whole(two_ranks: RankPool, job: str, strategies: list[str]) -> None:
    found_once = describe(MEASURED[job]())
    (expected,) = measured(alone(torch.device("cpu")), job, found_once, ["single"])
    for ranks in two_ranks(measured, job, found_once, strategies):
        for strategy, found in zip(strategies, ranks, strict=True):
            bound = 0.05 if "bf16" in strategy else 1e-5
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound, msg=f"{strategy}: {found} {expected}")


@pytest.mark.parametrize(("strategy", "how"), [("fsdp", "on_step"), ("pp=2:1f1b", "metric"), ("ddp", "on_eval")])
def test_one_rank_fails(two_ranks: RankPool, strategy: str, how: str) -> None:
    """All ranks say so, and none waits for it."""
    first, last = two_ranks(failure, facts(), strategy, how)
    assert first == last and "ValueError: on this rank alone" in first


def test_one_rank_has_seen_enough(two_ranks: RankPool) -> None:
    assert two_ranks(steps_until_asked, facts(), "ddp") == [(3, "on_step at step 2")] * 2


def test_hooks_on_gradients(two_ranks: RankPool) -> None:
    """What needs a whole gradient is refused where gradients are divided; elsewhere all ranks do the same."""
    for strategy in ("fsdp", "tp=2"):
        for hook in ("norm", "row", "noise"):
            for reason in two_ranks(refusal, facts(), strategy, hook):
                assert "does something else to a part" in reason, (strategy, hook, reason)
        assert two_ranks(refusal, facts(), strategy, "sign") == ["", ""]
    for hook in ("norm", "row", "noise", "sign"):
        assert two_ranks(refusal, facts(), "ddp", hook) == ["", ""]
    assert "must return None or a tensor" in two_ranks(refusal, facts(), "fsdp", "shape")[0]
