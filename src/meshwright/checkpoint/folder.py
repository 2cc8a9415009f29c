"""Checkpoints in a run's folder: named by step, published by rename; `latest` names the newest.

RUN/checkpoints/step-00000120/   a complete checkpoint; incomplete ones start with a dot
RUN/checkpoints/latest           the name of the newest
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.storage import write_durably
from meshwright.errors import CheckpointError, Unreadable
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

    def _retire(self, newest: Path) -> None:
        """Delete old checkpoints. Those of later steps than the newest count as oldest: the run went back."""
        if self._keep == 0:
            return
        last = step_of(newest)
        by_age = sorted(list_checkpoints(self.folder), key=lambda path: (step_of(path) <= last, step_of(path)))
        for path in by_age[: -self._keep]:
            if not (self._keep_every and step_of(path) % self._keep_every == 0):
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
