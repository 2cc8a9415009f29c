"""`compare` and `train --profile` as a user starts them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from compare_outcomes import JOB
from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes

EXAMPLES = Path(__file__).parents[2] / "examples"


def meshwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.thorough
def test_compare_writes_all_that_was_asked_for(tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"compare.{name}") for name in ("csv", "html", "trace")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    strategies = ["--strategies", "zero2", "pp=2:1f1b", "tp=5"]
    done = meshwright("compare", JOB, "--ranks", "2", "--steps", "2", "--rounds", "1", "--json", *options, *strategies)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {row["strategy"]: row for row in document["results"]}
    assert {name: row["status"] for name, row in rows.items()} == {"zero2": "ok", "pp=2:1f1b": "ok", "tp=5": "refused"}
    for field in ("step_ms", "samples_per_s", "peak_mib", "comm_share", "forecast"):
        assert rows["zero2"][field] and rows["pp=2:1f1b"][field]
    assert rows["pp=2:1f1b"]["forecast_timeline"]["origin"] == "forecast"
    assert "[1/3] one process for the losses, single" in done.stderr and "profiler_start" not in done.stderr
    with Path(files["csv"]).open(newline="") as file:
        assert [row["strategy"] for row in csv.DictReader(file)] == list(rows)
    assert "pp=2:1f1b" in Path(files["html"]).read_text()
    assert json.loads(Path(files["trace"]).read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.thorough
def test_train_keeps_traces_of_the_steps_and_ranks_that_are_wished(tmp_path: Path) -> None:
    out = tmp_path / "run"
    wish = ["--profile", "2-3", "--profile-ranks", "1"]
    done = meshwright("train", f"{EXAMPLES / 'cnn.py'}", "--ranks", "2", "--steps", "3", "--out", str(out), *wish)
    assert done.returncode == 0, done.stderr
    (trace,) = (out / "profile").iterdir()
    assert trace.name == "rank-1_steps-2-3.json"
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert "gloo:all_reduce" in names and sum(name.startswith("Optimizer.step") for name in names) == 2
    assert len((out / "records.csv").read_text().splitlines()) == 4
    assert "profiler_start" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--profile", "3"), "give --out a folder"),
        (("--log-to", "paper", "--out", "run"), "is none of tensorboard, wandb, mlflow"),
        (("--log-to", "tensorboard"), "give --out a folder"),
    ],
)
def test_wishes_of_train_that_cannot_be(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meshwright", "train", f"{EXAMPLES / 'cnn.py'}", *words])
    assert main_with_exit_codes(app) == 2
    assert message in capsys.readouterr().err
