"""A run's checkpoints in object storage, through fsspec: `s3://`, `gs://`, `file://`, `memory://`.

URL/step-00000120/rank-00000.safetensors   written first, by each rank
URL/step-00000120/checkpoint.json          then, by rank 0
URL/step-00000120/checkpoint.sha256        last: a checkpoint without it is incomplete and never loaded

An object store has no rename, so the last object is what publishes. It holds the digest of `checkpoint.json`, which
holds those of the data. PyTorch's own writer for fsspec pickles its metadata, so it is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import DIGESTS, MANIFEST
from meshwright.errors import BadInput, CheckpointError, MeshwrightError, OutputError, one_line

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
_STEP = re.compile(r"step-([0-9]{8,18})")
IN_ONE_PROCESS = ("memory",)
"""Stores that each process has for itself."""


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


class ObjectStore:
    """The checkpoints below one URL."""

    def __init__(self, url: str) -> None:
        if not is_url(url):
            raise BadInput(
                f"--store {url!r} is not a URL; write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///DIR."
            )
        self.url = url.rstrip("/")
        self._files, self._root = _open(self.url)

    @property
    def shared(self) -> bool:
        """Whether other processes see the same objects."""
        return self.url.partition("://")[0] not in IN_ONE_PROCESS

    def check(self) -> None:
        """Refuse a store that cannot be written, before a run begins."""
        with _writing(self.url):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(f"{self._root}/.writable", b"")
            self._files.rm_file(f"{self._root}/.writable")

    def complete(self) -> list[str]:
        """Names of complete checkpoints, oldest first."""
        return sorted(
            (name for name in self._steps() if self._files.exists(f"{self._root}/{name}/{DIGESTS}")), key=step_of_name
        )

    def put(self, file: Path, checkpoint: str) -> None:
        """Upload a file of a checkpoint."""
        with _writing(self.url):
            self._files.makedirs(f"{self._root}/{checkpoint}", exist_ok=True)
            self._files.put_file(str(file), f"{self._root}/{checkpoint}/{file.name}")

    def publish(self, folder: Path, checkpoint: str) -> None:
        """Make a checkpoint complete whose data files are uploaded."""
        self.put(folder / MANIFEST, checkpoint)
        self.put(folder / DIGESTS, checkpoint)

    def get(self, name: str, checkpoint: str, target: Path) -> None:
        """Download a file of a checkpoint to `target`; the caller checks its digest."""
        part = target.with_name(f".{target.name}.part")
        with _reading(f"{self.url}/{checkpoint}/{name}"):
            self._files.get_file(f"{self._root}/{checkpoint}/{name}", str(part))
            part.replace(target)

    def files_of(self, checkpoint: str) -> set[str]:
        with _reading(f"{self.url}/{checkpoint}"):
            return {_name(path) for path in self._files.ls(f"{self._root}/{checkpoint}", detail=False)}

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint; what publishes it goes first."""
        with _writing(self.url):
            marker = f"{self._root}/{checkpoint}/{DIGESTS}"
            if self._files.exists(marker):
                self._files.rm_file(marker)
            if self._files.exists(f"{self._root}/{checkpoint}"):
                self._files.rm(f"{self._root}/{checkpoint}", recursive=True)
            self._files.invalidate_cache()

    def clear(self) -> None:
        """Remove incomplete checkpoints, which a killed run left."""
        complete = set(self.complete())
        for name in self._steps():
            if name not in complete:
                self.remove(name)

    def _steps(self) -> list[str]:
        self._files.invalidate_cache()  # other processes write, too
        with _reading(self.url):
            try:
                found = [_name(path) for path in self._files.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []
        return [name for name in found if _STEP.fullmatch(name)]


def step_of_name(name: str) -> int:
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else -1


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise BadInput("--store needs fsspec: pip install 'meshwright[store]'.") from None
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise BadInput(f"--store {url} cannot be opened: {one_line(error)}") from None
    return files, str(root).rstrip("/")


@contextmanager
def _writing(url: str) -> Iterator[None]:
    """Turn what a store raises into a sentence; its clients have their own classes of errors."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        raise OutputError(f"{url} cannot be written: {one_line(error)}") from None


@contextmanager
def _reading(url: str) -> Iterator[None]:
    try:
        yield
    except (MeshwrightError, FileNotFoundError):
        raise
    except Exception as error:
        raise CheckpointError(f"{url} cannot be read: {one_line(error)}") from None
