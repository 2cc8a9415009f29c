"""Runs that are resumed, also under another strategy or after damage, as a user starts them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from checkpoint_contents import first_change
from checkpoint_samples import model_tensors
from meshwright.checkpoint.folder import find_checkpoint, list_checkpoints
from rank_pool import RankPool
from recovery_programs import train_undisturbed
from recovery_runs import (
    BATCH,
    IN_THE_WAY,
    JOB,
    SGD,
    STEPS,
    Call,
    contents,
    events,
    flip_a_byte,
    lines,
    new_folder,
    sample_at,
    saved_steps,
    slow,
    steps_recorded,
)

PLAIN = "\nDROPOUT = 0.0\n"
"""Other strategies draw other masks."""
RESUME = ("--out", "run", "--resume", "--steps", 7, "--strategy", "single")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPool) -> Path:
    """Four steps under fsdp on two ranks."""
    folder = new_folder(tmp_path_factory, "begun")
    (folder / "job.py").write_text(JOB + PLAIN)
    two_ranks(train_undisturbed, str(folder / "job.py"), "fsdp", 4, 2, str(folder / "run"))
    return folder / "run"


@pytest.fixture
def run(begun: Path, folder: Path) -> Path:
    (folder / "job.py").write_text(JOB + PLAIN)
    shutil.copytree(begun, folder / "run")
    return folder / "run"


@slow
def test_a_run_goes_on_under_another_strategy(call: Call, run: Path) -> None:
    done = call(*RESUME)
    summary = done.summary
    assert "resumed at step 4 (saved under fsdp=2 on 2 ranks)" in done.err
    assert (summary["steps"], summary["resumed_at"], summary["saved"]) == (7, 4, 7)
    assert summary["samples"] == 3 * BATCH and summary["strategy"] == "single"
    assert summary["stopped"] is None and summary["failed_saves"] == 0
    assert steps_recorded(run) == list(range(1, 8))
    assert events(run, "resumed") == [4] and events(run, "saved") == [2, 4, 7]
    assert call("--strategy", "single", "--steps", 7, "--out", "whole").code == 0
    resumed, expected = (model_tensors(find_checkpoint(path)) for path in (run, run.with_name("whole")))
    assert resumed.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
    losses = [record["loss"] for record in lines(run.with_name("whole") / "records.jsonl")]
    assert [record["loss"] for record in lines(run / "records.jsonl")] == pytest.approx(losses, rel=1e-5)


@slow
def test_a_run_that_has_all_its_steps(call: Call, run: Path) -> None:
    before = contents(run)
    for steps in (4, 3):
        summary = call(*RESUME, "--steps", steps).summary
        assert (summary["steps"], summary["resumed_at"], summary["saved"]) == (4, 4, 4)
        assert summary["samples"] == 0 and summary["first_loss"] is summary["last_loss"] is None
    assert contents(run) == before


@slow
@pytest.mark.parametrize(
    ("words", "job", "says"),
    [
        (("--seed", 3), "", ["--seed 3 was given", "has seed 0"]),
        ((), "\nWIDTH = 24\n", ["0.weight has shape (16, 4) in the checkpoint and (24, 4) in the job's model"]),
        ((), "\nold = build\nbuild = lambda: old().append(nn.Linear(2, 2))\n", ["The checkpoint lacks 4.weight"]),
        ((), SGD, ["The checkpoint's optimizer is AdamW, but the job's is SGD"]),
    ],
    ids=["seed", "shape", "layer", "optimizer"],
)
def test_what_does_not_fit(call: Call, run: Path, words: tuple[object, ...], job: str, says: list[str]) -> None:
    (run.parent / "job.py").write_text(JOB + job)
    before = contents(run)
    done = call(*RESUME, *words)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert all(word in done.err for word in says), done.err
    assert contents(run) == before and events(run, "resumed") == []


@slow
@pytest.mark.thorough
def test_two_ranks_refuse_another_job_together(call: Call, run: Path) -> None:
    (run.parent / "job.py").write_text(JOB + "\nWIDTH = 24\n")
    before = contents(run)
    done = call(*RESUME, "--strategy", "ddp", "--ranks", 2)
    assert done.code == 2
    assert "0.weight has shape (16, 4) in the checkpoint" in done.err.splitlines()[-1]
    assert "restart" not in done.err and "Traceback" not in done.err
    assert contents(run) == before


@slow
def test_a_run_is_not_overwritten(call: Call, run: Path) -> None:
    before = contents(run)
    done = call("--strategy", "single", "--steps", 7, "--out", "run")
    assert done.code == 2 and "already holds a run; continue it with --resume" in done.err
    assert contents(run) == before


def test_a_run_that_saved_nothing_is_resumed_at_the_beginning(call: Call, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "records.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')  # killed before it saved
    done = call("--strategy", "single", "--steps", 2, "--out", "run", "--resume")
    assert done.summary["resumed_at"] is None and done.summary["saved"] == 2
    assert "run holds no checkpoint yet; starting at step 0." in done.err
    assert steps_recorded(folder / "run") == [1, 2]


@pytest.mark.parametrize("words", [("--resume",), ("--save-every", 2)])
def test_what_needs_a_folder(call: Call, folder: Path, words: tuple[object, ...]) -> None:
    done = call("--strategy", "single", *words)
    assert done.code == 2 and done.err == f"error: {words[0]} needs the run's folder; give it with --out.\n"
    assert [path.name for path in folder.iterdir()] == ["job.py"]


def test_retention(call: Call, folder: Path) -> None:
    words = ("--save-every", 1, "--keep", 2, "--keep-every", 4)
    assert call("--strategy", "single", "--steps", STEPS, "--out", "run", *words).code == 0
    names = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-00000004", "step-00000008", "step-00000009"]
    assert find_checkpoint(folder / "run").name == "step-00000009"


GO_ON = ("--strategy", "single", "--steps", STEPS, "--out", "run", "--resume")


@pytest.fixture
def finished(whole_alone: Path, folder: Path) -> Path:
    shutil.copytree(whole_alone, folder / "run")
    return folder / "run"


@pytest.mark.parametrize("missing", [False, True])
def test_the_one_before_is_taken(call: Call, finished: Path, whole_alone: Path, missing: bool) -> None:
    newest = finished / "checkpoints" / "step-00000009"
    if missing:
        (newest / "checkpoint.json").unlink()
    else:
        flip_a_byte(newest)
    done = call(*GO_ON)
    assert (done.summary["resumed_at"], done.summary["saved"]) == (6, 9)
    told = [line for line in done.err.splitlines() if "Trying the one before." in line]
    assert len(told) == 1 and "step-00000009" in told[0]
    assert ("checkpoint.json is missing" if missing else "is not what was written") in told[0]
    assert steps_recorded(finished) == list(range(1, 10)) and events(finished, "resumed") == [6]
    (event,) = (event for event in lines(finished / "events.jsonl") if event["event"] == "damaged")
    assert event["checkpoint"] == "step-00000009"
    assert saved_steps(finished) == [3, 6, 9] and first_change(newest, find_checkpoint(whole_alone)) is None


def test_none_is_sound(call: Call, finished: Path) -> None:
    for checkpoint in list_checkpoints(finished / "checkpoints"):
        flip_a_byte(checkpoint)
    before = contents(finished)
    done = call(*GO_ON)
    assert done.code == 2 and done.out == ""
    *told, last = done.err.splitlines()
    assert [f"step-0000000{step}" in line for step, line in zip((9, 6, 3), told, strict=True)] == [True] * 3
    assert last.startswith("error: None of the 3 checkpoints in ") and "run/checkpoints is sound" in last
    assert contents(finished) == before


def test_a_last_state_that_cannot_be_saved(call: Call, folder: Path) -> None:
    """The run is done, and its exit code says that it is not kept."""
    (folder / "job.py").write_text(JOB + IN_THE_WAY + sample_at(2))
    done = call("--strategy", "single", "--steps", 3, "--out", "run")
    assert done.code == 1
    summary = json.loads(done.out)
    assert (summary["steps"], summary["saved"], summary["failed_saves"]) == (3, None, 1)
    assert "warning: step 3 was not saved (nothing is saved yet)" in done.err
    assert done.err.splitlines()[-1] == "error: The run's last state, step 3, could not be saved; see above."
    assert steps_recorded(folder / "run") == [1, 2, 3]
