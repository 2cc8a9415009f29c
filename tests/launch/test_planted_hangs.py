"""Hangs of every kind, planted in rank 1 of a real run: each is told with the rank and the line of the cause."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
JOB = TESTS / "hang_job.py"


def line_of(mark: str) -> str:
    """Where the planted line is, as messages name it."""
    (number,) = [number for number, line in enumerate(JOB.read_text().splitlines(), 1) if line.endswith(f"# {mark}")]
    return f"hang_job.py:{number}, in "


def run(how: str, *, workers: int = 0, patience: float = 4.0) -> tuple[int, str]:
    words = ["--strategy", "ddp", "--ranks", "2", "--steps", "80", "--patience", str(patience), "--on-hang", "end"]
    command = [sys.executable, "-m", "meshwright", "train", str(JOB), *words, "--workers", str(workers)]
    done = subprocess.run(
        ["env", f"MESHWRIGHT_TEST_HANG={how}", f"PYTHONPATH={TESTS.parent / 'src'}", *command, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "workers", "words"),
    [
        ("asleep", 0, [r"Rank 1 has been silent .* in step 6", line_of("line of the sleeper")]),
        ("skipped", 0, ["ranks are in different collectives: rank 0 is in barrier", line_of("line of the others")]),
        ("other", 0, ["ranks are in different collectives", f"rank 1 is in barrier at {line_of('line of rank 1')}"]),
        ("stuck loader", 1, ["Rank 1 .* waits for a data-loading process", line_of("line of the loader")]),
        ("stopped loader", 1, ["Rank 1 .* waits for a data-loading process", "data-loading processes does not answer"]),
    ],
)
def test_a_planted_hang_is_told(how: str, workers: int, words: list[str]) -> None:
    code, told = run(how, workers=workers)
    assert code == 1
    (error,) = [line for line in told.splitlines() if line.startswith("error: ")]
    for part in words:
        assert re.search(part, error), error
    assert "rank 0 on " in told and "rank 1 on " in told  # the stacks of all ranks


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rank_at_half_speed_is_told() -> None:
    code, told = run("slow", patience=60.0)
    assert code == 0
    assert "Rank 1 is slow: of each step it works" in told


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sound_run_raises_no_alarm() -> None:
    code, told = run("sound", workers=1)
    assert code == 0
    assert "silent" not in told and "slow" not in told
