"""Runs whose ranks are killed or fail, or that are asked to stop, as a user starts them."""

from pathlib import Path

import pytest

from checkpoint_contents import first_change
from meshwright.checkpoint.folder import find_checkpoint
from recovery_runs import (
    JOB,
    KILL_ONCE,
    LIMIT_SECONDS,
    NO_NUMBER,
    RAISE,
    STEPS,
    Call,
    damage_of,
    events,
    lines,
    processes_of,
    sample_at,
    saved_steps,
    signal_once,
    slow,
    start,
    steps_recorded,
)
from toy_worker import wait_for

TWO_RANKS = ("--strategy", "ddp", "--ranks", 2, "--steps", STEPS, "--save-every", 2, "--out", "run")


@slow
def test_a_killed_rank_costs_nothing(call: Call, folder: Path, whole_on_two: Path) -> None:
    (folder / "job.py").write_text(JOB + KILL_ONCE + sample_at(6, ranks=2, rank=1))
    done = call(*TWO_RANKS)
    assert done.summary["steps"] == done.summary["saved"] == STEPS
    told = [line for line in done.err.splitlines() if "; restart " in line]
    assert len(told) == 1
    assert told[0].startswith("Rank 1 was ended by SIGKILL") and told[0].endswith("; restart 1 of 3")
    # The save of step 4 was perhaps under way.
    assert done.summary["resumed_at"] in (2, 4)
    assert events(folder / "run", "resumed") == [done.summary["resumed_at"]]
    assert steps_recorded(folder / "run") == list(range(1, STEPS + 1))
    assert first_change(find_checkpoint(folder / "run"), find_checkpoint(whole_on_two)) is None
    wait_for(lambda: processes_of(folder) == [])


@slow
@pytest.mark.thorough
def test_without_restarts(call: Call, folder: Path) -> None:
    (folder / "job.py").write_text(JOB + KILL_ONCE + sample_at(6, ranks=2, rank=1))
    done = call(*TWO_RANKS, "--max-restarts", 0)
    assert done.code == 1 and done.out == ""
    assert done.err.splitlines()[-1].startswith("error: Rank 1 was ended by SIGKILL")
    assert "; restart " not in done.err
    assert damage_of(find_checkpoint(folder / "run")) == []
    wait_for(lambda: processes_of(folder) == [])


@slow
@pytest.mark.thorough
def test_restarts_are_used_up(call: Call, folder: Path) -> None:
    (folder / "job.py").write_text(JOB + RAISE + sample_at(6, ranks=2, rank=1))
    done = call(*TWO_RANKS, "--max-restarts", 1)
    assert done.code == 1 and done.out == ""
    restarts = [line for line in done.err.splitlines() if "; restart " in line]
    assert restarts == ["Rank 1 failed: ValueError: bad sample; restart 1 of 1"]
    assert done.err.splitlines()[-1] == "error: Rank 1 failed: ValueError: bad sample (after 1 restart)"
    assert done.err.count("Traceback (most recent call last)") == 1
    assert done.err.count("raise ValueError('bad sample')") == 1
    assert damage_of(find_checkpoint(folder / "run")) == []
    wait_for(lambda: processes_of(folder) == [])


@slow
def test_a_loss_that_is_no_number(call: Call, folder: Path) -> None:
    """The state that gave it is not saved, and the one before is."""
    (folder / "job.py").write_text(JOB + NO_NUMBER + sample_at(5, ranks=2, rank=1))
    done = call(*TWO_RANKS)
    assert done.code == 2 and done.out == ""
    assert "The loss became nan at step 5, first on rank 1" in done.err.splitlines()[-1]
    assert "; restart " not in done.err
    assert saved_steps(folder / "run") == [2, 4]
    assert damage_of(find_checkpoint(folder / "run")) == []
    assert find_checkpoint(folder / "run").name == "step-00000004"
    assert steps_recorded(folder / "run") == [1, 2, 3, 4]


@slow
@pytest.mark.parametrize(
    ("ranks", "strategy", "undisturbed", "signals"),
    [
        pytest.param(2, "ddp", "whole_on_two", {"SIGTERM": 7}, id="two ranks", marks=pytest.mark.thorough),
        pytest.param(
            *(1, "single", "whole_alone", {"SIGTERM": 4, "SIGUSR1": 7}), id="alone", marks=pytest.mark.thorough
        ),
    ],
)
def test_signals_save_and_end(
    request: pytest.FixtureRequest,
    call: Call,
    folder: Path,
    ranks: int,
    strategy: str,
    undisturbed: str,
    signals: dict[str, int],
) -> None:
    """A run that is asked to stop and resumed; alone also asked again and resumed again.

    That both signals reach the ranks is in tests/launch/test_launch.py.
    """
    words = ("--strategy", strategy, "--ranks", ranks, "--steps", STEPS, "--out", "run", "--resume")
    whole, run = request.getfixturevalue(undisturbed), folder / "run"
    before = None
    for name, step in signals.items():
        (folder / "once").unlink(missing_ok=True)
        (folder / "job.py").write_text(JOB + signal_once(name) + sample_at(step, ranks=ranks, rank=ranks - 1))
        summary = start(folder, *words, "--grace", LIMIT_SECONDS).summary
        assert (summary["stopped"], summary["resumed_at"]) == (name, before)
        assert summary["steps"] == summary["saved"] == step
        assert steps_recorded(run) == list(range(1, step + 1))
        assert find_checkpoint(run).name == f"step-0000000{step}" and damage_of(find_checkpoint(run)) == []
        assert processes_of(folder) == []
        before = step
    asked = [event for event in lines(run / "events.jsonl") if event["event"] == "asked to stop"]
    assert [(event["signal"], event["step"]) for event in asked] == [*signals.items()]
    summary = call(*words).summary
    assert (summary["resumed_at"], summary["stopped"], summary["saved"]) == (7, None, STEPS)
    assert first_change(find_checkpoint(run), find_checkpoint(whole)) is None
    assert steps_recorded(run) == list(range(1, STEPS + 1))
