"""A save that fails says why on all ranks, leaves nothing behind and nothing changed, and the next one works."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import pytest
import torch

import disk_programs as programs
from checkpoint_jobs import facts_of
from checkpoint_programs import Setup, make_run, take_steps
from disk_programs import files_up_to
from meshwright.assemble.world import alone
from meshwright.checkpoint.manifest import DIGESTS, MANIFEST
from meshwright.errors import OutputError
from meshwright.runtime.run import Run
from rank_pool import RankPool

JOB = "plain"
SMALL_DISK = "mount -t tmpfs -o size=4m small-disk {folder} && exec {python} {program} {folder}"


def setting(strategy: str) -> Setup:
    return Setup(JOB, facts_of(JOB), strategy)


@pytest.fixture
def run() -> Run:
    made = make_run(alone(torch.device("cpu")), setting("single"))
    take_steps(made, 1)
    return made


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("limit", [10, 1000, 10_000])
def test_one_process(run: Run, tmp_path: Path, limit: int, background: bool) -> None:
    """From the first bytes on, and in the middle of the data."""
    said = programs.limited(run.world, setting("single"), str(tmp_path), [limit], background)
    assert said == ["Rank 0 could not write the checkpoint: File too large."] * 2


@pytest.mark.parametrize("name", [MANIFEST, DIGESTS])
@pytest.mark.parametrize("background", [False, True])
def test_what_is_written_last(run: Run, tmp_path: Path, name: str, background: bool) -> None:
    """All data is there already."""

    @contextmanager
    def full() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("meshwright.checkpoint.storage.write_durably", write)
            yield

    def write(path: Path, text: str) -> None:
        if path.name == name:
            path.write_text(text[:100])
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        path.write_text(text)

    said = programs.survive(run.world, setting("single"), tmp_path, full, background)
    assert said == ["Rank 0 could not write the checkpoint: No space left on device."] * 2


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks(two_ranks: RankPool, tmp_path: Path, rank: int, background: bool) -> None:
    limits = [None if other != rank else 1000 for other in range(2)]
    for said in two_ranks(programs.limited, setting("zero1"), str(tmp_path), limits, background):
        assert said == [f"Rank {rank} could not write the checkpoint: File too large."] * 2


@pytest.mark.slow
@pytest.mark.thorough  # limits on the sizes of files, above, end a save in the same way
def test_a_full_disk(tmp_path: Path) -> None:
    """A real one, small enough to fill, in a name space of its own; on one rank and on two."""
    unshare = [shutil.which("unshare") or "unshare", "-Urm", "sh", "-c"]
    probe = f"mount -t tmpfs -o size=1m small-disk {tmp_path}"
    if shutil.which("unshare") is None or subprocess.run([*unshare, probe], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here; limits on the sizes of files are tested above")
    script = SMALL_DISK.format(folder=tmp_path, python=sys.executable, program=programs.__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*unshare, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 2 * (1 + 2)
    assert all(re.match(r"Rank \d+ could not write the checkpoint: ", line) for line in lines)
    assert all(line.endswith(": No space left on device.") for line in lines)


def test_a_path_below_a_file(run: Run, tmp_path: Path) -> None:
    """As a folder that is not ours: root may write everywhere else."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="Not a directory"):
        run.save(tmp_path / "file" / "checkpoint")
    run.save(tmp_path / "checkpoint")
    run.load(tmp_path / "checkpoint")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(run: Run, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        run.save(tmp_path / "closed" / "checkpoint")
    run.save(tmp_path / "checkpoint")


def test_something_in_the_way(run: Run, tmp_path: Path) -> None:
    """It stays as it is, and nothing is left beside it."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    (tmp_path / "file").write_text("mine")
    for name, problem in {"taken": "already exists and is not empty", "file": "is a file"}.items():
        with pytest.raises(OutputError, match=f"{name} {problem}"):
            run.save(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]
    (tmp_path / "empty").mkdir()
    run.save(tmp_path / "empty")
    run.load(tmp_path / "empty")


@pytest.mark.parametrize("path", [".", "new", "new/", "../here/new", "a/b/c"])
def test_relative_paths(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run.save(path)
    assert run.load(tmp_path / "here" / path).step == 1


@pytest.mark.slow
def test_ranks_that_cannot_write(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for said in two_ranks(programs.try_to_save, setting("zero1"), str(tmp_path / "file" / "checkpoint")):
        assert said == "Rank 0 could not write the checkpoint: Not a directory."


def test_waiting_tells_what_the_background_did(run: Run, tmp_path: Path) -> None:
    """Once: then the next save is tried as if nothing had been."""
    folder = programs.RunFolder(tmp_path / "checkpoints")
    with files_up_to(100):
        programs.save_in(run.saver, run.data_position, 1, folder, background=True)
        with pytest.raises(OutputError, match="File too large"):
            run.saver.wait()
    run.saver.wait()
    assert not run.saver.busy
    programs.save_in(run.saver, run.data_position, 1, folder, background=True)
    run.saver.wait()
    assert run.load(tmp_path / "checkpoints").step == 1


def test_the_next_save_tells_of_the_one_before(run: Run, tmp_path: Path) -> None:
    folder = programs.RunFolder(tmp_path / "checkpoints")
    with files_up_to(100):
        programs.save_in(run.saver, run.data_position, 1, folder, background=True)
        with pytest.raises(OutputError, match="File too large"):
            run.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    run.save(tmp_path / "other")
