"""Checkpoints in a run's folder: named by step, published by rename; `latest` names the newest. Other folders, too, are
written under another name and renamed when complete, and file errors become sentences.

RUN/checkpoints/step-00000120/   a complete checkpoint; incomplete ones start with a dot
RUN/checkpoints/latest           the name of the newest
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.storage import write_durably
from meshwright.errors import CheckpointError, OutputError, Unreadable
from meshwright.reading import read_text

CHECKPOINTS, LATEST = "checkpoints", "latest"
_STEP = re.compile(r"step-([0-9]{8,18})")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: the path itself, or the latest of a run's folder."""
    if (path / MANIFEST).is_file() or (_STEP.fullmatch(path.name) and path.is_dir()):
        return path
    for folder in (path / CHECKPOINTS, path):
        if latest := read_latest(folder):
            return latest
        if checkpoints := list_checkpoints(folder):
            return checkpoints[-1]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint's folder or a run's.")
    raise CheckpointError(f"{path} is not a checkpoint: it has neither {MANIFEST} nor {CHECKPOINTS}/.")


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run, oldest first. They were complete when published; damage is found on reading."""
    return sorted((path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def read_latest(folder: Path) -> Path | None:
    try:
        name = read_text(folder / LATEST, limit=4096).strip()
    except Unreadable:
        return None
    path = folder / name
    return path if _STEP.fullmatch(name) and path.is_dir() else None


class RunFolder:
    """The `checkpoints` folder of one run. Only one process, the coordinator, changes it."""

    def __init__(self, folder: Path, *, keep: int = 0, keep_every: int = 0) -> None:
        """Keep the newest `keep` (0: all), and also those whose step is a multiple of `keep_every`."""
        self.folder, self._keep, self._keep_every = folder, keep, keep_every

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it is published."""
        return self.folder / f".step-{step:08d}.part"

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is when it is complete."""
        return self.folder / f"step-{step:08d}"

    def clear(self) -> None:
        """Remove incomplete checkpoints of a killed run."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def publish(self, temporary: Path) -> None:
        """Publish the complete and flushed folder `temporary` as a checkpoint, then delete those no longer kept."""
        target = self.folder / temporary.name.removeprefix(".").removesuffix(".part")
        sync_folder(temporary)
        if target.exists():  # a run that resumed from an older checkpoint reaches this step again
            self._point_elsewhere(target)
            self._remove(target)
        temporary.rename(target)
        sync_folder(self.folder)
        self.point_to(target)
        self._retire(target)

    def point_to(self, checkpoint: Path) -> None:
        part = self.folder / f".{LATEST}.part"
        write_durably(part, checkpoint.name + "\n")
        part.replace(self.folder / LATEST)
        sync_folder(self.folder)

    def _point_elsewhere(self, target: Path) -> None:
        others = [path for path in list_checkpoints(self.folder) if path != target and (path / MANIFEST).is_file()]
        if others:
            self.point_to(others[-1])
        else:
            (self.folder / LATEST).unlink(missing_ok=True)

    def kept(self, names: Iterable[str], *, newest: str) -> set[str]:
        """Those of the checkpoints that are kept. Later ones than the newest count as oldest: the run went back."""
        steps = {name: step_of(Path(name)) for name in names}
        if self._keep == 0:
            return set(steps)
        last = step_of(Path(newest))
        by_age = sorted(steps, key=lambda name: (steps[name] <= last, steps[name]))
        return {*by_age[-self._keep :], *(n for n in steps if self._keep_every and steps[n] % self._keep_every == 0)}

    def _retire(self, newest: Path) -> None:
        paths = list_checkpoints(self.folder)
        kept = self.kept((path.name for path in paths), newest=newest.name)
        for path in paths:
            if path.name not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename before deleting, so that a half-deleted folder never looks like a checkpoint."""
        away = self.folder / f".{path.name}.old"
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to write into; it becomes `target` on success and disappears on failure."""
    refuse_taken(target)
    wanted, target = target, target.resolve()
    temporary = target.with_name(f".{target.name}.part")
    with new_folder(temporary, wanted=wanted):
        yield temporary
        sync_folder(temporary)
        temporary.replace(target)
        sync_folder(target.parent)


@contextmanager
def new_folder(path: Path, *, wanted: Path) -> Iterator[None]:
    """Make a folder and its parents; remove what was made if the block fails. Errors name the path `wanted`."""
    missing = [folder for folder in path.parents if not folder.exists()]
    done = False
    try:
        shutil.rmtree(path, ignore_errors=True)  # left by a killed process
        path.mkdir(parents=True)
        yield
        done = True
    except OSError as error:
        raise OutputError(f"{wanted} cannot be written: {error.strerror or error}.") from None
    finally:
        if not done:
            _remove(path, missing)


def refuse_taken(target: Path) -> None:
    """Refuse to write to anything but a new path or an empty folder."""
    if target.exists() and not target.is_dir():
        raise OutputError(f"{target} is a file; give the path of a new folder.")
    if target.exists() and any(target.iterdir()):
        raise OutputError(f"{target} already exists and is not empty; give the path of a new folder.")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None


def _remove(path: Path, parents: list[Path]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    for folder in parents:
        with suppress(OSError):  # another process may have put something there
            folder.rmdir()
