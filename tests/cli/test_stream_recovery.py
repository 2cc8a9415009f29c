"""A streaming, shuffled, ragged run is killed and resumed on another number of ranks and workers."""

import json
from itertools import chain
from pathlib import Path

import pytest

from recovery_runs import Call, lines, processes_of, slow
from toy_worker import wait_for

JOB = """
import json, os, signal
from time import monotonic, sleep
from pathlib import Path
import torch
from stream_jobs import Shuffled, make, of_rows

HERE = Path(__file__).parent

class Killed(Shuffled):
    def __iter__(self):
        for number, sample in enumerate(super().__iter__()):
            if (HERE / "kill").exists() and number == 40 and torch.distributed.get_rank() == 1:
                (HERE / "kill").unlink()
                until = monotonic() + 30
                while not (HERE / "run" / "checkpoints" / "latest").exists() and monotonic() < until:
                    sleep(0.05)  # checkpoints are written in the background
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample

SEEN = []

def loss(output, batch):
    if "MESHWRIGHT_FOLDER" in os.environ:  # a rank; the command itself only looks at the job
        SEEN.append(batch["index"])
    return of_rows(output, batch)

class Noting(torch.optim.AdamW):
    def step(self, closure=None):
        if SEEN:
            with open(HERE / f"seen-{os.getpid()}", "a") as file:
                file.write(json.dumps(torch.cat(SEEN).tolist()) + chr(10))
            SEEN.clear()
        return super().step(closure)

job = make(Killed(), loss=loss, optimizer=lambda params: Noting(params, lr=0.01))
"""
STEPS, KEPT = 14, 4
"""Of eight a epoch; the last step saved before the rank dies in the seventh."""


def seen_in(folder: Path) -> list[list[list[int]]]:
    """The samples of each step, for each rank that has trained."""
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("seen-*"))]
    for path in folder.glob("seen-*"):
        path.unlink()
    return found


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in lines(folder / "run" / "records.jsonl")]


@slow
def test_no_sample_is_lost_or_repeated(call: Call, folder: Path) -> None:
    (folder / "job.py").write_text(JOB)
    options = ("--steps", STEPS, "--out", "run", "--save-every", KEPT)
    one_rank = ("--strategy", "single", "--ranks", 1, "--max-restarts", 1, "--workers", 2)
    assert call(*options, *one_rank).code == 0
    (whole,) = seen_in(folder)
    expected = losses(folder)
    (folder / "run").rename(folder / "uninterrupted")

    (folder / "kill").touch()
    killed = call(*options, "--strategy", "zero1,mb=2", "--ranks", 2, "--max-restarts", 0)
    assert killed.code == 1 and "Rank 1 was ended by SIGKILL" in killed.err
    assert "each of the 2 ranks reads all of it" in killed.err
    wait_for(lambda: processes_of(folder) == [])
    before = [list(chain.from_iterable(step)) for step in zip(*seen_in(folder), strict=False)]
    assert KEPT <= len(before) < 8

    resumed = call(*options, *one_rank, "--resume")
    assert resumed.summary["resumed_at"] == KEPT, resumed.err
    assert f"passing over {KEPT * 6} samples" in resumed.err and "warning" not in resumed.err
    (after,) = seen_in(folder)
    assert [sorted(step) for step in before[:KEPT] + after] == [sorted(step) for step in whole]
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
