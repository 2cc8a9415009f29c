"""Checkpoints in a run's folder: what is published, what is the latest, what is kept."""

from pathlib import Path

import pytest

from meshwright.checkpoint.folder import RunFolder, find_checkpoint, list_checkpoints, read_latest, refuse_taken
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.errors import CheckpointError, OutputError


def publish(folder: RunFolder, step: int, content: str = "") -> Path:
    """As a save does, but for what is in it."""
    temporary = folder.temporary(step)
    temporary.mkdir(parents=True)
    (temporary / MANIFEST).write_text(content)
    folder.publish(temporary)
    return folder.folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def folder(run: Path) -> Path:
    return run / "checkpoints"


def test_published(folder: Path, run: Path) -> None:
    published = publish(RunFolder(folder), 7, "seven")
    assert published.name == "step-00000007"
    assert (published / MANIFEST).read_text() == "seven"
    assert read_latest(folder) == published
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000007"]
    assert (folder / "latest").read_text() == "step-00000007\n"


def test_in_the_order_of_steps(folder: Path) -> None:
    for step in (2, 10, 9, 123456789, 1):
        publish(RunFolder(folder), step)
    assert steps(folder) == [1, 2, 9, 10, 123456789]


def test_found_by_any_of_its_names(folder: Path, run: Path) -> None:
    first, second = publish(RunFolder(folder), 1), publish(RunFolder(folder), 2)
    for path in (run, folder, second):
        assert find_checkpoint(path) == second
    assert find_checkpoint(first) == first


def test_saved_by_name_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MANIFEST).touch()
    assert find_checkpoint(tmp_path / "mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    "latest", [None, "", "nonsense\n", "step-00000009\n", "../outside\n", "step-00000002/../../..\n", b"\xff\xfe"]
)
def test_latest_missing_or_damaged(folder: Path, run: Path, latest: str | bytes | None) -> None:
    """The newest is found without it, and nothing outside of the folder ever is."""
    publish(RunFolder(folder), 1)
    newest = publish(RunFolder(folder), 2)
    (run / "outside").mkdir()
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    assert read_latest(folder) is None
    assert find_checkpoint(run) == newest


def test_latest_is_a_folder(folder: Path, run: Path) -> None:
    newest = publish(RunFolder(folder), 2)
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    assert find_checkpoint(run) == newest


def test_latest_is_not_the_highest_after_going_back(folder: Path, run: Path) -> None:
    for step in (1, 2, 3):
        publish(RunFolder(folder), step)
    again = publish(RunFolder(folder), 2, "again")
    assert find_checkpoint(run) == again


@pytest.mark.parametrize("there", [[], ["checkpoints"], ["step-1"], ["step-abc"], [".step-00000003.part"]])
def test_no_checkpoint(run: Path, there: list[str]) -> None:
    run.mkdir()
    for name in there:
        (run / name).mkdir()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        find_checkpoint(run)


def test_no_folder(run: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(run)


def test_a_file_is_no_run(run: Path) -> None:
    run.write_text("a file")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        find_checkpoint(run)


@pytest.mark.parametrize(
    ("keep", "keep_every", "expected"),
    [
        (0, 0, [10, 20, 30, 40, 50, 60]),
        (0, 40, [10, 20, 30, 40, 50, 60]),
        (1, 0, [60]),
        (2, 0, [50, 60]),
        (9, 0, [10, 20, 30, 40, 50, 60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
        (1, 1, [10, 20, 30, 40, 50, 60]),
        (1, 7, [60]),
    ],
)
def test_what_is_kept(folder: Path, keep: int, keep_every: int, expected: list[int]) -> None:
    kept = RunFolder(folder, keep=keep, keep_every=keep_every)
    for step in range(10, 70, 10):
        publish(kept, step)
    assert steps(folder) == expected
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *(f"step-{step:08d}" for step in expected)]


def test_what_was_just_saved_is_kept_after_going_back(folder: Path) -> None:
    """Step 40 is damaged, say, so the run took up step 30 again."""
    kept = RunFolder(folder, keep=2)
    for step in (10, 20, 30, 40):
        publish(kept, step)
    for step, expected in ((31, [30, 31]), (32, [31, 32]), (33, [32, 33])):
        published = publish(kept, step)
        assert read_latest(folder) == published
        assert steps(folder) == expected


def test_the_same_step_again(folder: Path, run: Path) -> None:
    folder_of_run = RunFolder(folder, keep=2)
    for step in (1, 2):
        publish(folder_of_run, step, "first")
    again = publish(folder_of_run, 2, "second")
    assert (again / MANIFEST).read_text() == "second"
    assert steps(folder) == [1, 2]
    assert find_checkpoint(run) == again
    assert not list(folder.glob(".*"))


def test_the_only_step_again(folder: Path) -> None:
    publish(RunFolder(folder), 1, "first")
    assert (publish(RunFolder(folder), 1, "second") / MANIFEST).read_text() == "second"
    assert steps(folder) == [1]


def test_a_death_while_the_same_step_is_replaced(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found then is complete: the one before."""
    before = publish(RunFolder(folder), 1, "first")
    publish(RunFolder(folder), 2, "first")
    folder_of_run = RunFolder(folder)
    temporary = folder_of_run.temporary(2)
    temporary.mkdir()
    (temporary / MANIFEST).write_text("second")

    def die(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    original = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, target: (die if path == temporary else original)(path, target))
    with pytest.raises(KeyboardInterrupt):
        folder_of_run.publish(temporary)
    assert find_checkpoint(run) == before


def test_leftovers_are_no_checkpoints_and_go(folder: Path, run: Path) -> None:
    published = publish(RunFolder(folder), 1)
    for name in (".step-00000002.part", ".step-00000001.old"):
        (folder / name / "inner").mkdir(parents=True)
        (folder / name / MANIFEST).touch()
    assert steps(folder) == [1]
    assert find_checkpoint(run) == published
    RunFolder(folder).clear()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]


def test_clearing_where_nothing_is(folder: Path) -> None:
    RunFolder(folder).clear()
    assert not folder.exists()


def test_other_files_are_left_alone(folder: Path) -> None:
    publish(RunFolder(folder), 1)
    for name in ("notes.txt", ".hidden", "step-00000001.txt"):
        (folder / name).write_text("mine")
    RunFolder(folder, keep=1).clear()
    publish(RunFolder(folder, keep=1), 2)
    assert steps(folder) == [2]
    assert {"notes.txt", ".hidden", "step-00000001.txt"} <= {path.name for path in folder.iterdir()}


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    refuse_taken(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    refuse_taken(tmp_path / "empty")
    (tmp_path / "full" / "inner").mkdir(parents=True)
    with pytest.raises(OutputError, match="full already exists and is not empty"):
        refuse_taken(tmp_path / "full")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file"):
        refuse_taken(tmp_path / "file")
