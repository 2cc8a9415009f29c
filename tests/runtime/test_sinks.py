"""Records beside JSON lines: CSV that survives a resume, and the real clients of other tools, offline."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import BadInput
from meshwright.runtime import sinks
from meshwright.runtime.run_records import RunRecorder
from meshwright.runtime.sinks import CSV, check_services, numbers, open_services


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "grad_norm": float("inf"), "skipped": False, **more}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / CSV).open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_is_always_written_line_by_line(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.write(record(1))
        assert [row["step"] for row in rows(tmp_path)] == ["1"]
        recorder.write(record(2))
    assert [(row["step"], row["loss"], row["skipped"]) for row in rows(tmp_path)] == [
        ("1", "1.0", "False"),
        ("2", "0.5", "False"),
    ]


def test_a_resumed_run_goes_on_after_its_step(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        for step in (1, 2, 3):
            recorder.write(record(step))
    with (tmp_path / CSV).open("a") as file:
        file.write("4,0.2")  # what a killed run leaves
    with RunRecorder(tmp_path, after=2) as recorder:
        recorder.write(record(3, loss=9.0))
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [("1", "1.0"), ("2", "0.5"), ("3", "9.0")]


class Broken:
    """A client whose server is gone."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, record: Any) -> None:
        self.written += 1
        raise ConnectionError("no answer")

    def close(self) -> None:
        raise ConnectionError("no answer")


def test_a_client_that_fails_is_one_warning_and_the_rest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    with RunRecorder(tmp_path, services=[broken]) as recorder:
        recorder.write(record(1))
        recorder.write(record(2))
    assert broken.written == 2 and len(rows(tmp_path)) == 2
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and "no answer" in told


def test_only_numbers_are_drawn() -> None:
    assert numbers({"step": 3, "loss": 0.5, "grad_norm": float("nan"), "note": "text", "skipped": True}) == {
        "loss": 0.5,
        "skipped": True,
    }


def test_a_tool_that_is_not_known_or_not_installed_is_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="'paper' is none of tensorboard, wandb, mlflow"):
        check_services(["paper"], tmp_path)
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'meshwright\[wandb\]'"):
        check_services(["wandb"], tmp_path)


def test_a_tool_needs_the_run_s_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: True)
    with pytest.raises(BadInput, match="give --out a folder"):
        check_services(["mlflow"], None)
    check_services([], None)


def test_a_client_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes `import wandb` fail
    with pytest.raises(BadInput, match="--log-to wandb was given, but its client cannot start"):
        open_services(["wandb"], tmp_path, {})


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for after in (0, 1):
        services = open_services(["wandb"], tmp_path, {"strategy": "ddp"})
        with RunRecorder(tmp_path, after=after, services=services) as recorder:
            recorder.write(record(after + 1))
        wandb.teardown()  # its service writes in the background
    identity = (tmp_path / "wandb-run").read_text()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(folder.name.endswith(identity) for folder in folders)
    files = [file for folder in folders for file in folder.glob("*.wandb")]
    assert all(b"loss" in file.read_bytes() for file in files)


@pytest.mark.slow
def test_mlflow_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for after in (0, 1):
        services = open_services(["mlflow"], tmp_path, {"strategy": "ddp", "ranks": 2})
        with RunRecorder(tmp_path, after=after, services=services) as recorder:
            recorder.write(record(after + 1))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run((tmp_path / "mlflow-run").read_text())
    assert run.data.params == {"strategy": "ddp", "ranks": "2"} and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5)]
    assert "grad_norm" not in run.data.metrics
