"""A run's folder and what is written into it."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import OutputError
from meshwright.runtime import run_records
from meshwright.runtime.run_records import RECORDS, RunRecorder, prepare_output


def refusal(folder: Path) -> str:
    with pytest.raises(OutputError) as caught:
        prepare_output(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def strictly(text: str) -> Any:
    """JSON as other languages read it, without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_new_folder_is_not_left_behind(tmp_path: Path) -> None:
    prepare_output(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nor_are_the_folders_above_it(tmp_path: Path) -> None:
    prepare_output(tmp_path / "runs" / "first" / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    prepare_output(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written: Not a directory" in refusal(tmp_path / "file" / "out")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written: File exists" in refusal(tmp_path / "file")


def test_a_name_that_no_file_system_takes(tmp_path: Path) -> None:
    assert "cannot be written: File name too long" in refusal(tmp_path / ("x" * 300))


def test_records_of_another_run(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text("")
    message = refusal(tmp_path)
    assert "already holds a run" in message
    assert "continue it with --resume" in message


def test_records_are_lines_of_json(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    records = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25, "skipped": True}]
    with RunRecorder(folder) as recorder:
        recorder.write(records[0])
        # Whoever follows the file while a run is under way sees whole lines.
        assert (folder / RECORDS).read_text().splitlines() == [json.dumps(records[0])]
        recorder.write(records[1])
    assert [strictly(line) for line in (folder / RECORDS).read_text().splitlines()] == records


def test_a_number_that_json_does_not_have(tmp_path: Path) -> None:
    """A step that fp16 skipped has an infinite gradient norm."""
    with RunRecorder(tmp_path) as recorder:
        recorder.write({"step": 1, "grad_norm": float("inf"), "loss": float("nan")})
    assert strictly((tmp_path / RECORDS).read_text())["step"] == 1


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunRecorder(None, tensorboard=True) as recorder:
        recorder.write({"step": 1})
    assert list(tmp_path.iterdir()) == []


class Board:
    """Stands in for TensorBoard's writer."""

    def __init__(self, folder: Path) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, key: str, value: float, step: int) -> None:
        self.scalars.append((key, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boards: list[Board] = []
    monkeypatch.setattr(run_records, "_tensorboard", lambda folder: boards.append(Board(folder)) or boards[0])
    with RunRecorder(tmp_path, tensorboard=True) as recorder:
        recorder.write({"step": 4, "loss": 2.5, "note": "text"})
    assert boards[0].scalars == [("loss", 2.5, 4)]
    assert boards[0].closed
