"""The jobs that are written from scripts train as the scripts do."""

import os
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from adopt_programs import adopted_losses
from meshwright.adopt.adopt import adopt
from meshwright.jobs.load import load_job
from page_runner import ONE_RANK, run_script_alone
from rank_pool import RankPool

SCRIPTS = Path(__file__).parent / "scripts"
ALWAYS = ("ddp_trainer", "gpt_style")
"""Of different styles, and fit to run in this process; the others are thorough."""
EVERY = [
    pytest.param(path.stem, marks=() if path.stem in ALWAYS else pytest.mark.thorough)
    for path in sorted(SCRIPTS.glob("*.py"))
]


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@cache
def losses_of_script(name: str) -> list[float]:
    """What the script itself prints, run alone in plain PyTorch."""
    printed = run_script_alone([f"{name}.py"], SCRIPTS, ONE_RANK) if name in ALWAYS else run_apart(name)
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


def run_apart(name: str) -> str:
    """In a process of its own, because some scripts start others or leave groups behind."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, str(SCRIPTS / f"{name}.py")]
    done = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(name: str, folder: Path) -> Path:
    adoption = adopt(SCRIPTS / f"{name}.py", name="job.py")
    assert adoption.job.todo == []
    path = folder / f"{name}_job.py"
    path.write_text(adoption.job.text)
    return path


@pytest.mark.parametrize("name", EVERY)
def test_the_job_trains_as_the_script(name: str, tmp_path: Path) -> None:
    expected = losses_of_script(name)
    assert len(expected) == 6
    assert adopted_losses(None, write(name, tmp_path), "single", 6) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("ddp_trainer", "ddp"),
        ("gpt_style", "fsdp"),
        pytest.param("shared_vocabulary", "ddp", marks=pytest.mark.thorough),
        pytest.param("with_accelerate", "fsdp", marks=pytest.mark.thorough),
        pytest.param("accumulation", "ddp,mb=2", marks=pytest.mark.thorough),
        pytest.param("summed_loss", "ddp", marks=pytest.mark.thorough),
        pytest.param("frozen", "fsdp", marks=pytest.mark.thorough),
    ],
)
def test_the_job_trains_alike_on_two_ranks(two_ranks: RankPool, name: str, strategy: str, tmp_path: Path) -> None:
    found = two_ranks(adopted_losses, write(name, tmp_path), strategy, 6)
    for losses in found:
        assert losses == pytest.approx(losses_of_script(name), rel=1e-5)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_job_loads(path: Path, tmp_path: Path) -> None:
    if path.stem == "with_accelerate":
        pytest.importorskip("accelerate")
    assert load_job(str(write(path.stem, tmp_path))).global_batch > 0
