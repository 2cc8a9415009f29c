"""The checkpoints of a run in training, in one process."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from checkpoint_contents import first_change
from checkpoint_samples import save_in_boxes
from meshwright.checkpoint.folder import find_checkpoint, list_checkpoints
from meshwright.checkpoint.integrity import find_damage
from meshwright.checkpoint.manifest import read_manifest
from meshwright.errors import CheckpointError, OutputError, WrongCheckpoint
from meshwright.runtime.checkpoints import Checkpoints, saved_seed
from meshwright.runtime.train import train
from minimal import make_job, sample
from toy_worker import wait_for

BATCH = sample(40)


class Rows:
    """A data set that does something when a sample is taken."""

    def __init__(self) -> None:
        self.taken = 0
        self.then: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(BATCH["x"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.taken += 1
        self.then.get(self.taken, lambda: None)()
        return {key: value[index] for key, value in BATCH.items()}


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def run(rows: Rows) -> Iterator[mw.Run]:
    with make_run(rows) as made:
        yield made


def make_run(rows: Rows, *, seed: int = 0) -> mw.Run:
    return mw.setup(make_job(data=rows, global_batch=8), "single", device="cpu", seed=seed)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def take_steps(run: mw.Run, count: int = 1) -> None:
    for batch in run.batches(steps=count):
        run.step(batch)


def put_a_file_there(out: Path) -> None:
    """Whatever was saved goes."""
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    (out / "checkpoints").write_text("in the way")


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails(run: mw.Run, out: Path, capsys: pytest.CaptureFixture[str], background: bool) -> None:
    """It is told and counted, the next one is tried, and whoever trains need not care."""
    checkpoints = Checkpoints(run, out, every=1)
    checkpoints.prepare()
    put_a_file_there(out)
    for step in (1, 2):
        take_steps(run)
        checkpoints.save(background=background)
        checkpoints.wait()
        assert (checkpoints.failures, checkpoints.saved) == (step, None)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in told] == [
        " step 1 was not saved (nothing is saved yet)",
        " step 2 was not saved (nothing is saved yet)",
    ]
    assert all("could not write the checkpoint" in line for line in told)

    (out / "checkpoints").unlink()
    take_steps(run)
    checkpoints.save(background=background)
    checkpoints.wait()
    assert (checkpoints.failures, checkpoints.saved) == (2, 3)
    assert names(out) == ["latest", "step-00000003"]
    saved = find_checkpoint(out)
    assert read_manifest(saved).run_state.step == 3 and not find_damage(saved, read_manifest(saved))

    put_a_file_there(out)
    take_steps(run)
    checkpoints.save(background=background)
    checkpoints.wait()
    assert "step 4 was not saved (the last one is of step 3)" in capsys.readouterr().err
    assert [(event["event"], event["step"]) for event in events(out)] == [
        *[("save failed", 1), ("save failed", 2), ("saved", 3), ("save failed", 4)]
    ]
    assert len(checkpoints.stalls) == 4


def test_training_goes_on_when_a_save_fails(rows: Rows, tmp_path: Path) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    with make_run(Rows()) as run:
        train(run, steps=6, out=undisturbed, checkpoints=Checkpoints(run, undisturbed, every=2), progress=False)
    with make_run(rows) as run:

        def clear_the_way() -> None:
            wait_for(lambda: not run.saver.busy)
            (out / "checkpoints").unlink()

        learnt = 2 + 3 + 5 + 3  # samples by which the layout of batches is learnt
        rows.then = {learnt + 9: lambda: put_a_file_there(out), learnt + 33: clear_the_way}  # when steps 2 and 5 begin
        summary = train(run, steps=6, out=out, checkpoints=Checkpoints(run, out, every=2), progress=False)
    assert (summary.steps, summary.failed_saves, summary.saved) == (6, 2, 6)
    assert [event["step"] for event in events(out) if event["event"] == "save failed"] == [2, 4]
    assert names(out) == ["latest", "step-00000006"]
    assert first_change(find_checkpoint(out), find_checkpoint(undisturbed)) is None
    assert [json.loads(line)["step"] for line in (out / "records.jsonl").read_text().splitlines()] == [*range(1, 7)]


def test_the_run_folder_itself_is_gone(run: mw.Run, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be written down must not end the run either."""
    checkpoints = Checkpoints(run, out)
    checkpoints.prepare()
    shutil.rmtree(out)
    out.write_text("in the way")
    take_steps(run)
    checkpoints.save()
    checkpoints.wait()
    assert checkpoints.failures == 1
    assert "step 1 was not saved" in capsys.readouterr().err


def test_what_a_killed_run_left_is_cleared(run: mw.Run, out: Path) -> None:
    checkpoints = Checkpoints(run, out)
    take_steps(run)
    checkpoints.prepare()
    checkpoints.save(background=False)
    for left in (".step-00000002.part", ".step-00000001.old"):
        (out / "checkpoints" / left).mkdir()
        (out / "checkpoints" / left / "rank-00000.safetensors").write_text("half")
    Checkpoints(run, out).prepare()
    assert names(out) == ["latest", "step-00000001"]
    assert not find_damage(find_checkpoint(out), read_manifest(find_checkpoint(out)))


def test_a_rank_that_does_not_see_the_folder(out: Path) -> None:
    run: Any = SimpleNamespace(is_main=True, world=SimpleNamespace(gather=lambda value: [value, False]))
    with pytest.raises(OutputError, match=r"Rank 1 does not see .*run; use a folder that all nodes share"):
        Checkpoints(run, out).prepare()


def test_when_a_save_is_due(run: mw.Run, out: Path) -> None:
    every_two, never = Checkpoints(run, out, every=2), Checkpoints(run, out)
    due = []
    for _ in range(4):
        take_steps(run)
        due.append(every_two.is_due())
        assert not never.is_due()
    assert due == [False, True, False, True]


def test_the_end_is_saved_once(run: mw.Run, out: Path) -> None:
    checkpoints = Checkpoints(run, out)
    checkpoints.prepare()
    checkpoints.finish()
    assert names(out) == []  # there is nothing that a new run does not have
    take_steps(run, 2)
    checkpoints.save()
    checkpoints.finish()
    take_steps(run)
    checkpoints.finish()
    checkpoints.finish()
    assert [event["step"] for event in events(out)] == [2, 3]


@pytest.fixture
def saved(out: Path) -> Path:
    """The folder of a run with checkpoints of steps 1, 2 and 3 and seed 5."""
    with make_run(Rows(), seed=5) as run:
        checkpoints = Checkpoints(run, out, every=1)
        checkpoints.prepare()
        for _ in range(3):
            take_steps(run)
            checkpoints.save(background=False)
    return out


def hurt(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def test_resume_takes_the_newest(saved: Path, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    with make_run(rows, seed=5) as run:
        checkpoints = Checkpoints(run, saved)
        assert checkpoints.resume() is not None
        assert (run.trainer.steps, run.position, checkpoints.saved) == (3, 24, 3)
    assert capsys.readouterr().err == "resumed at step 3 (saved under single on 1 rank)\n"


def test_resume_takes_what_latest_names(saved: Path, rows: Rows) -> None:
    (saved / "checkpoints" / "latest").write_text("step-00000002\n")
    with make_run(rows, seed=5) as run:
        Checkpoints(run, saved).resume()
        assert run.trainer.steps == 2


@pytest.mark.parametrize("latest", ["", "step-00000009", "../elsewhere", None])
def test_resume_without_a_latest_that_is_there(saved: Path, rows: Rows, latest: str | None) -> None:
    if latest is None:
        (saved / "checkpoints" / "latest").unlink()
    else:
        (saved / "checkpoints" / "latest").write_text(latest)
    with make_run(rows, seed=5) as run:
        Checkpoints(run, saved).resume()
        assert run.trainer.steps == 3


def test_resume_passes_over_damage(saved: Path, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    one, *later = list_checkpoints(saved / "checkpoints")
    for checkpoint in later:
        hurt(checkpoint)
    with make_run(rows, seed=5) as run:
        checkpoints = Checkpoints(run, saved)
        checkpoints.resume()
        assert run.trainer.steps == checkpoints.saved == 1
        told = capsys.readouterr().err.splitlines()
        assert ["step-00000003" in told[0], "step-00000002" in told[1], len(told)] == [True, True, 3]
        hurt(one)
        with pytest.raises(CheckpointError, match=r"None of the 3 checkpoints in .* is sound"):
            checkpoints.resume()
    assert [event.get("checkpoint") for event in events(saved)[3:]] == [
        *("step-00000003", "step-00000002", None),
        *("step-00000003", "step-00000002", "step-00000001"),
    ]


def test_resume_passes_over_an_empty_checkpoint(saved: Path, rows: Rows) -> None:
    """Of which all files were removed."""
    newest = saved / "checkpoints" / "step-00000003"
    shutil.rmtree(newest)
    newest.mkdir()
    with make_run(rows, seed=5) as run:
        Checkpoints(run, saved).resume()
        assert run.trainer.steps == 2


def test_resume_where_nothing_is_saved(run: mw.Run, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(run, out)
    assert checkpoints.resume() is None and checkpoints.saved is None
    assert capsys.readouterr().err == f"{out} holds no checkpoint yet; starting at step 0.\n"


@pytest.mark.parametrize("asked", [None, 5])
def test_the_seed_is_that_of_the_run(saved: Path, asked: int | None) -> None:
    assert saved_seed(saved, asked) == 5


def test_another_seed_is_refused(saved: Path) -> None:
    with pytest.raises(WrongCheckpoint, match=r"--seed 0 was given, but the run in .*run has seed 5"):
        saved_seed(saved, 0)


def test_the_seed_where_the_newest_is_damaged(saved: Path) -> None:
    (saved / "checkpoints" / "step-00000003" / "checkpoint.json").write_text("{")
    assert saved_seed(saved, None) == 5


@pytest.mark.parametrize(("asked", "taken"), [(None, 0), (7, 7)])
def test_the_seed_where_there_is_none(out: Path, asked: int | None, taken: int) -> None:
    assert saved_seed(out, asked) == taken
    # Imported weights have no run behind them.
    save_in_boxes(out / "checkpoints" / "step-00000000", {"model/a": BATCH["x"]}, step=0, seed=3)
    assert saved_seed(out, asked) == taken
