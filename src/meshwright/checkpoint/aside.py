"""Folders that are written aside and renamed, so that half of one never looks whole; and errors as sentences."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.checkpoint.folder import sync_folder
from meshwright.errors import CheckpointError, OutputError


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A folder to write into that becomes `target` if all goes well, and leaves nothing behind if not."""
    refuse_taken(target)
    wanted, target = target, target.resolve()
    aside = target.with_name(f".{target.name}.part")
    with new_folder(aside, wanted=wanted):
        yield aside
        sync_folder(aside)
        aside.replace(target)
        sync_folder(target.parent)


@contextmanager
def new_folder(path: Path, *, wanted: Path) -> Iterator[None]:
    """Make a folder and those above it; if the block fails, remove what was made. Errors name the place `wanted`."""
    missing = [folder for folder in path.parents if not folder.exists()]
    done = False
    try:
        shutil.rmtree(path, ignore_errors=True)  # what a killed process left
        path.mkdir(parents=True)
        yield
        done = True
    except OSError as error:
        raise OutputError(f"{wanted} cannot be written: {error.strerror or error}.") from None
    finally:
        if not done:
            _remove(path, missing)


def refuse_taken(target: Path) -> None:
    """Only what is not there yet, or an empty folder, is written to."""
    if target.exists() and not target.is_dir():
        raise OutputError(f"{target} is a file; give the path of a new folder.")
    if target.exists() and any(target.iterdir()):
        raise OutputError(f"{target} is there already and not empty; give the path of a new folder.")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system refuses to read, as an error that says so."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None


def _remove(path: Path, above: list[Path]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    for folder in above:
        with suppress(OSError):  # somebody else may have put something there
            folder.rmdir()
