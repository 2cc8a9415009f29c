"""A run owns its folder: who comes second is told who holds it, and what a crash left is taken over."""

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright.errors import OutputError
from meshwright.runtime import run_lock
from meshwright.runtime.run_lock import LOCK, Holder, owned


def leave_lock(folder: Path, holder: Holder) -> Path:
    folder.mkdir()
    (folder / LOCK).write_text(json.dumps(asdict(holder)))
    return folder


def elsewhere() -> Holder:
    return replace(run_lock._own(), host="another-host")


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    with (
        owned(tmp_path / "run"),
        pytest.raises(OutputError, match=rf"process {os.getpid()}, .*choose another --out"),
        owned(tmp_path / "run"),
    ):
        pass


def test_nothing_is_left(tmp_path: Path) -> None:
    with owned(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()
    assert not list(tmp_path.iterdir())
    with owned(tmp_path / "run"):
        (tmp_path / "run" / "records").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["records"]


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"born": "1"}, {"boot": "another"}])
def test_a_lock_of_one_who_is_gone_is_taken_over(
    tmp_path: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = leave_lock(tmp_path / "run", replace(run_lock._own(), **change))  # type: ignore[arg-type]
    with owned(folder):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    assert "is gone; taking over its lock" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}'])
def test_a_lock_that_says_nothing_is_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with owned(tmp_path):
        pass


def test_without_locks_of_the_file_system_the_name_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_flock", lambda descriptor: None)
    with owned(tmp_path), pytest.raises(OutputError, match="is being written by the run on"), owned(tmp_path):
        pass


def test_a_holder_on_another_host_that_gives_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    folder, ended = leave_lock(tmp_path / "run", elsewhere()), threading.Event()
    descriptor = os.open(folder / LOCK, os.O_RDWR)
    beats = threading.Thread(target=run_lock._beat, args=(folder / LOCK, descriptor, ended))
    beats.start()
    try:
        with pytest.raises(OutputError, match="run on another-host"), owned(folder):
            pass
    finally:
        ended.set()
        beats.join()
        os.close(descriptor)


def test_a_holder_on_another_host_that_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    with owned(leave_lock(tmp_path / "run", elsewhere())):
        pass
