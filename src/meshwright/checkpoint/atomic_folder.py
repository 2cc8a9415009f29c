"""Write folders atomically: into a temporary folder that is renamed when complete. And file errors as sentences."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.checkpoint.folder import sync_folder
from meshwright.errors import CheckpointError, OutputError


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
