"""Runs of `meshwright train` in folders of their own: a job that can be hurt, and what there is to see of a run.

The command line runs in this process where it is not signalled, so that a launch costs no more than its ranks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.assemble.batch import Share
from meshwright.checkpoint.folder import list_checkpoints, step_of
from meshwright.checkpoint.integrity import find_damage
from meshwright.checkpoint.manifest import read_manifest
from meshwright.cli.main import app
from meshwright.cli.outcome import main_with_exit_codes
from meshwright.runtime.data import Order

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
from meshwright.launch.preemption import Preemption
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
    if checkpoints.is_dir():  # the sample is also looked at when the layout of batches is learnt
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
    order = Order(samples=SAMPLES, global_batch=BATCH, seed=0, share=Share(ranks=ranks, rank=rank))
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
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        return main_with_exit_codes(app)


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


def start(folder: Path, *words: object) -> Done:
    """`meshwright train job.py` as a process of its own, which may be signalled."""
    command = [sys.executable, "-m", "meshwright", "train", "job.py", *map(str, words), "--device", "cpu", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)
