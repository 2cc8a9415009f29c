"""The verbs as a user starts them: processes, exit codes, the one document on stdout.

Where the process itself is not the question the command line runs in this one, so that it costs no more than its ranks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from job_text import JOB
from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes

pytestmark = pytest.mark.slow

Call = Callable[..., subprocess.CompletedProcess[str]]
LIMIT_SECONDS = 240
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


def meshwright(*words: str, folder: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(launcher or ("-m",)), "meshwright", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=ENVIRONMENT, check=False
    )


def ranks_left(folder: Path) -> list[str]:
    """Command lines of ranks that were started in the folder and are still there."""
    commands = [_command_in(folder, process) for process in Path("/proc").glob("[0-9]*")]
    return [command for command in commands if "meshwright.launch.rank" in command]


def _command_in(folder: Path, process: Path) -> str:
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return command if (process / "cwd").readlink() == folder else ""
    except OSError:  # it has ended
        return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB + "print('a job may print')\n")
    return tmp_path


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    def meshwright_here(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["meshwright", *words])
        capfd.readouterr()
        code = main_with_exit_codes(app)
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return meshwright_here


def test_train_ends_with_what_rehearse_had_found(call: Call, folder: Path) -> None:
    words = ("--strategy", "ddp", "--json")
    done = call("rehearse", "job.py", "--world", "2", *words)
    assert done.returncode == 0, done.stderr
    rehearsed = json.loads(done.stdout)
    assert {"strategy", "world", "rank", "device", "measured", "forecast", "error"} <= rehearsed.keys()
    assert (rehearsed["strategy"], rehearsed["world"], rehearsed["rank"], rehearsed["fits"]) == ("ddp=2", 2, 0, True)
    assert rehearsed["error"]["memory"] is not None and rehearsed["measured"]["step_ms"] > 0
    done = call("train", "job.py", "--ranks", "2", "--steps", "3", "--out", "runs/a", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["forecast"]
    assert found["forecast"]["source"] == "rehearse"
    assert found["forecast"]["step_ms"] == rehearsed["measured"]["step_ms"]
    events = [json.loads(line) for line in (folder / "runs/a/events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "forecast against measured" and events[-1]["error"] == found["error"]


def test_a_rehearsal_that_does_not_fit_exits_1(call: Call) -> None:
    done = call("rehearse", "job.py", "--strategy", "ddp", "--world", "2", "--memory", "500B")
    assert done.returncode == 1
    assert "does not fit into 500 B" in " ".join(done.stdout.split())


def test_train_writes_records_and_a_checkpoint(folder: Path) -> None:
    words = ("train", "job.py", "--strategy", "fsdp,mb=1", "--ranks", "2", "--steps", "7", "--out", "runs/a")
    done = meshwright(*words, "--tensorboard", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 7 and summary["ranks"] == 2 and summary["samples"] == 7 * 8
    assert summary["start_up_s"] >= 0
    assert summary["last_loss"] < summary["first_loss"]
    assert len(summary["peak_bytes"]) == 2
    records = [json.loads(line) for line in (folder / "runs/a/records.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 8))
    expected = {"loss", "grad_norm", "lr", "step_ms", "samples_per_s", "memory_mib"}
    assert all(expected <= record.keys() for record in records)
    assert (folder / "runs/a/checkpoints/latest").read_text() == "step-00000007\n"
    assert list((folder / "runs/a/tensorboard").iterdir())


def test_torchrun_starts_and_restarts_the_ranks(folder: Path) -> None:
    """A rank that is killed once, by its own data, when there is a checkpoint: one restart is enough."""
    killing = """
class Killing(type(job.data)):
    def __getitem__(self, index):
        marker = pathlib.Path("killed")
        saved = any(pathlib.Path("run").rglob("checkpoint.sha256"))
        if os.environ.get("RANK") == "1" and saved and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


job.data.__class__ = Killing
"""
    (folder / "job.py").write_text("import os, pathlib\n" + JOB + killing)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "-m")
    words = ("train", "job.py", "--strategy", "zero2", "--steps", "4", "--out", "run", "--save-every", "1", "--json")
    done = meshwright(*words, folder=folder, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert (folder / "killed").exists()
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["ranks"]) == (4, 2)
    assert "resumed at step" in done.stderr


@pytest.mark.thorough  # README and tests/docs run verify, too
def test_verify_prints_one_document(call: Call) -> None:
    done = call("verify", "job.py", "--ranks", "2", "--strategies", "ddp", "fsdp,ac=full", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["reference"] == "plain PyTorch"
    assert [result["strategy"] for result in document["results"]] == ["single", "ddp", "fsdp,ac=full"]
    for result in document["results"]:
        assert result["equal"] and result["status"] == "equal" and result["loss_max_rel"] <= 1e-10
        assert result["precision"] == "float64" and result["grad_max_rel"] <= 1e-10
    assert {"grad_norm_max_rel", "param_max_abs", "first_difference", "cause"} <= document["results"][0].keys()


@pytest.mark.thorough
def test_verify_exits_1_where_a_strategy_differs(call: Call, folder: Path) -> None:
    """A loss that looks at its rank is not the same training."""
    spoiled = (
        "import os\nparts['loss'] = lambda o, b: (loss(o, b)[0] * (1 + int(os.environ.get('WORLD_SIZE', 1))), len(o))"
    )
    (folder / "job.py").write_text(
        JOB + spoiled.replace("WORLD_SIZE", "RANK") + "\njob = Job(**parts, global_batch=8)\n"
    )
    done = call("verify", "job.py", "--ranks", "2", "--strategies", "ddp", "--json")
    assert done.returncode == 1, done.stderr
    single, ddp = json.loads(done.stdout)["results"]
    assert single["equal"] and ddp["status"] == "differs"
    assert ddp["first_difference"].startswith("gradient of 0.weight: differs by ")


def test_verify_has_a_row_for_what_is_refused_and_for_what_fails(call: Call, folder: Path) -> None:
    """A rank that raises ends its strategy and no other, and plain PyTorch knows of no ranks."""
    failing = """
import os
class Failing(nn.Linear):
    def forward(self, x):
        if os.environ.get("RANK") == "1":
            raise ValueError("not on this rank")
        return super().forward(x)
parts["model"] = lambda: nn.Sequential(Failing(4, 2))
job = Job(**parts, global_batch=8)
"""
    (folder / "job.py").write_text(JOB + failing)
    done = call("verify", "job.py", "--ranks", "2", "--strategies", "hsdp=2x2", "ddp", "--json")
    assert done.returncode == 1, done.stderr
    single, refused, failed = json.loads(done.stdout)["results"]
    assert (single["status"], refused["status"], failed["status"]) == ("equal", "refused", "failed")
    assert "hsdp=2x2 needs 4 ranks" in refused["first_difference"]
    assert "Rank 1 failed: ValueError: not on this rank" in failed["first_difference"]


FAILURES = {
    "raise ValueError('bad sample')": (1, "Rank 1 failed: ValueError: bad sample"),
    "os.kill(os.getpid(), 9)": (1, "Rank 1 was ended by SIGKILL"),
    "return {'x': torch.full((4,), float('nan')), 'y': torch.ones(2)}": (
        2,
        "The loss became nan at step 1, first on rank 1",
    ),
}


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=pytest.mark.thorough if place else ()) for place, one in enumerate(FAILURES)]
)
def test_a_failing_rank_ends_the_run(call: Call, folder: Path, what: str) -> None:
    """With nothing saved; test_recovery.py has the same of runs that save, under ddp."""
    class_body = f"""
import os
class Bad(Data):
    def __getitem__(self, index):
        if os.environ.get("RANK") == "1":
            {what}
        return super().__getitem__(index)
parts["data"] = Bad()
job = Job(**parts, global_batch=8)
"""
    (folder / "job.py").write_text(JOB + class_body)
    done = call("train", "job.py", "--strategy", "fsdp", "--ranks", "2", "--steps", "5")
    code, message = FAILURES[what]
    assert done.returncode == code, done.stderr
    assert message in done.stderr.splitlines()[-1]
    if code == 1 and "raise" in what:
        first = done.stderr.index("--- rank 1 ---")
        assert "bad sample" in done.stderr[first:]
    assert ranks_left(folder) == []


def test_train_for_epochs_with_evaluations(call: Call, folder: Path) -> None:
    evaluation = "job = Job(**parts, global_batch=16, evaluation=Evaluation(data=Data()))"
    (folder / "job.py").write_text(f"{JOB}from meshwright import Evaluation\n{evaluation}\n")
    words = ("train", "job.py", "--strategy", "single", "--device", "cpu", "--epochs", "2", "--eval-every", "2")
    done = call(*words, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (6, 2, 80)
    assert summary["evaluation"]["step"] == 6
    assert done.stderr.count("evaluation: loss") == len((2, 3, 4, 6))


def test_evaluations_of_a_job_that_has_none(call: Call) -> None:
    done = call("train", "job.py", "--strategy", "single", "--eval-every", "2")
    assert done.returncode == 2 and "the job has no evaluation" in done.stderr
