"""Folders in which runs are started, resumed and hurt."""

from pathlib import Path

import pytest

from rank_pool import RankPool
from recovery_programs import train_undisturbed
from recovery_runs import JOB, MARK, STEPS, Call, Done, new_folder, saved_steps, train


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


@pytest.fixture(scope="module")
def whole_on_two(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPool) -> Path:
    """A run of two ranks that nobody disturbed."""
    folder = new_folder(tmp_path_factory, "two")
    two_ranks(train_undisturbed, str(folder / "job.py"), "ddp", STEPS, 0, str(folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def whole_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one process, with several checkpoints."""
    folder = new_folder(tmp_path_factory, "alone")
    words = ("--strategy", "single", "--steps", STEPS, "--save-every", 3, "--out", "run")
    assert train(folder, *words) == 0
    assert saved_steps(folder / "run") == [3, 6, 9]
    return folder / "run"
