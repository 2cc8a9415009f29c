"""Runs that are resumed, killed, asked to stop or find damage, as a user starts them.

The command line runs in this process where it is not signalled, so that a launch costs no more than its ranks.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_contents import first_change
from checkpoint_samples import model_tensors
from meshwright.checkpoint.folder import find_checkpoint, list_checkpoints, step_of
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.soundness import find_damage
from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes
from meshwright.runtime.data import Order
from toy_worker import wait_for

slow = pytest.mark.slow

STEPS, BATCH, SAMPLES = 9, 8, 80
LIMIT_SECONDS = 240
MARK = "MESHWRIGHT_TEST"
"""An environment variable by which all processes of a test are found."""

JOB = f"""
import os, signal
from pathlib import Path
import torch
from torch import nn
from meshwright import Job
from meshwright.runtime.preemption import Preemption
from toy_worker import wait_for

DROPOUT, WIDTH = 0.1, 16
AT, ONCE = None, Path(__file__).with_name("once")

def draw(n, seed=None):
    generator = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
    return {{"x": torch.randn(n, 4, generator=generator), "y": torch.randn(n, 2, generator=generator)}}

def spoil(sample):
    return sample

class Data:
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, index):
        sample = {{key: value[0] for key, value in draw(1, index).items()}}
        return spoil(sample) if index == AT else sample

def build():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(WIDTH, 2))

job = Job(
    model=lambda: build(),
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (((output - batch["y"]) ** 2).sum(), len(output)),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
    sample=draw,
    data=Data(),
    global_batch={BATCH},
)
"""

ONCE = """
def spoil(sample):
    if not ONCE.exists():
        ONCE.touch()
        hurt()
    return sample
"""
KILL_ONCE = f"{ONCE}\ndef hurt():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
RAISE = "\ndef spoil(sample):\n    raise ValueError('bad sample')\n"
IN_THE_WAY = """
def spoil(sample):
    checkpoints = Path(__file__).with_name("run") / "checkpoints"
    checkpoints.rmdir()
    checkpoints.touch()
    return sample
"""
SGD = """
from dataclasses import replace
job = replace(job, optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
"""
NO_NUMBER = "\ndef spoil(sample):\n    return {**sample, 'x': sample['x'] * float('nan')}\n"


def signal_once(name: str) -> str:
    """The process that a user started is signalled in the middle of a step, before the rank looks whether it was."""
    return f"""{ONCE}
def hurt():
    os.kill(os.getppid() if "MESHWRIGHT_FOLDER" in os.environ else os.getpid(), signal.{name})
    wait_for(lambda: Preemption().begin().asked is not None)
"""


def sample_at(step: int, *, ranks: int = 1, rank: int = 0) -> str:
    """A line for the job: what is spoiled is a sample that a rank first takes in this step."""
    order = Order(samples=SAMPLES, global_batch=BATCH, seed=0, ranks=ranks, rank=rank)
    return f"\nAT = {next(order.parts((step - 1) * BATCH)).indices[0]}\n"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return json.loads(self.out)


Call = Callable[..., Done]


def train(folder: Path, *words: object) -> int:
    """`meshwright train job.py` in a folder; returns the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["meshwright", "train", "job.py", *map(str, words), "--device", "cpu", "--json"])
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        return main_with_exit_codes(app)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setenv(MARK, str(tmp_path))
    return tmp_path


@pytest.fixture
def call(folder: Path, capfd: pytest.CaptureFixture[str]) -> Call:
    def train_here(*words: object) -> Done:
        capfd.readouterr()
        code = train(folder, *words)
        return Done(code, *capfd.readouterr())

    return train_here


def processes_of(folder: Path) -> list[int]:
    """Those that a test has started and that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={folder}".encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_recorded(run: Path) -> list[int]:
    return [record["step"] for record in lines(run / "records.jsonl")]


def events(run: Path, kind: str) -> list[int]:
    """The steps at which something happened."""
    return [event["step"] for event in lines(run / "events.jsonl") if event["event"] == kind]


def saved_steps(run: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run / "checkpoints")]


def damage_of(checkpoint: Path) -> list[Any]:
    return list(find_damage(checkpoint, read_manifest(checkpoint)))


def contents(run: Path) -> dict[str, bytes]:
    """All of a run but what happened to it."""
    paths = [path for path in run.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def flip_a_byte(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def new_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    path = factory.mktemp(name)
    (path / "job.py").write_text(JOB)
    return path


@pytest.fixture(scope="module")
def whole_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nobody disturbed."""
    folder = new_folder(tmp_path_factory, "two")
    assert train(folder, "--strategy", "ddp", "--ranks", 2, "--steps", STEPS, "--out", "run") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def whole_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one process, with several checkpoints."""
    folder = new_folder(tmp_path_factory, "alone")
    words = ("--strategy", "single", "--steps", STEPS, "--save-every", 3, "--out", "run")
    assert train(folder, *words) == 0
    assert saved_steps(folder / "run") == [3, 6, 9]
    return folder / "run"


PLAIN = "\nDROPOUT = 0.0\n"
"""Other strategies draw other masks."""
RESUME = ("--out", "run", "--resume", "--steps", 7, "--strategy", "single")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps under fsdp on two ranks."""
    folder = new_folder(tmp_path_factory, "begun")
    (folder / "job.py").write_text(JOB + PLAIN)
    words = ("--strategy", "fsdp", "--ranks", 2, "--steps", 4, "--save-every", 2, "--out", "run")
    assert train(folder, *words) == 0
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
        (("--seed", 3), "", ["--seed 3 was asked for", "has seed 0"]),
        ((), "\nWIDTH = 24\n", ["0.weight has the shape (16, 4) in the checkpoint and (24, 4) in the job's model"]),
        ((), "\nold = build\nbuild = lambda: old().append(nn.Linear(2, 2))\n", ["The checkpoint has no 4.weight"]),
        ((), SGD, ["is of a run with AdamW, and the job's optimizer is SGD"]),
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
def test_two_ranks_refuse_another_job_together(call: Call, run: Path) -> None:
    (run.parent / "job.py").write_text(JOB + "\nWIDTH = 24\n")
    before = contents(run)
    done = call(*RESUME, "--strategy", "ddp", "--ranks", 2)
    assert done.code == 2
    assert "0.weight has the shape (16, 4) in the checkpoint" in done.err.splitlines()[-1]
    assert "restart" not in done.err and "Traceback" not in done.err
    assert contents(run) == before


@slow
def test_a_run_is_not_overwritten(call: Call, run: Path) -> None:
    before = contents(run)
    done = call("--strategy", "single", "--steps", 7, "--out", "run")
    assert done.code == 2 and "already holds a run; --resume goes on with it" in done.err
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
    told = [line for line in done.err.splitlines() if "Going back to the one before." in line]
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
def test_without_restarts(call: Call, folder: Path) -> None:
    (folder / "job.py").write_text(JOB + KILL_ONCE + sample_at(6, ranks=2, rank=1))
    done = call(*TWO_RANKS, "--max-restarts", 0)
    assert done.code == 1 and done.out == ""
    assert done.err.splitlines()[-1].startswith("error: Rank 1 was ended by SIGKILL")
    assert "; restart " not in done.err
    assert damage_of(find_checkpoint(folder / "run")) == []
    wait_for(lambda: processes_of(folder) == [])


@slow
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
        pytest.param(2, "ddp", "whole_on_two", {"SIGTERM": 7}, id="two ranks"),
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

    That both signals reach the ranks is in tests/runtime/test_launch.py.
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


def start(folder: Path, *words: object) -> Done:
    """`meshwright train job.py` as a process of its own, which may be signalled."""
    command = [sys.executable, "-m", "meshwright", "train", "job.py", *map(str, words), "--device", "cpu", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)
