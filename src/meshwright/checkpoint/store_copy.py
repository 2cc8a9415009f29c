"""Keep a run's checkpoints in object storage, with a copy in each node's own folder for fast restarts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from meshwright.checkpoint.folder import RunFolder
from meshwright.checkpoint.integrity import damage_in, find_damage, find_gaps, raise_damage
from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, Manifest, read_manifest
from meshwright.checkpoint.object_store import ObjectStore, step_of_name
from meshwright.errors import CheckpointError, DamagedCheckpoint


class Copy(Protocol):
    """Where files of a checkpoint go besides the folder that they are written to."""

    def begin(self) -> None:
        """Called on rank 0, before any rank writes."""

    def put(self, file: Path) -> None:
        """Called on each rank for its file, in the thread that saves."""

    def publish(self, folder: Path) -> None:
        """Called on rank 0, when all files and the manifest are written."""

    def ended(self, folder: Path) -> None:
        """Called on each rank, after the checkpoint is published."""


class StoreCopy:
    """Uploads the checkpoint of one step, and publishes the copies of all nodes."""

    def __init__(self, store: ObjectStore, local: RunFolder, step: int, *, leads_other_node: bool) -> None:
        """`leads_other_node`: this rank is the first of a node that does not have rank 0."""
        self._store, self._local, self._leads = store, local, leads_other_node
        self._name = local.path_of(step).name

    def begin(self) -> None:
        self._store.remove(self._name)  # of a run that resumed from an older checkpoint and reaches this step again

    def put(self, file: Path) -> None:
        self._store.put(file, self._name)

    def publish(self, folder: Path) -> None:
        """The store first: what it does not have must not look saved."""
        self._store.publish(folder, self._name)
        self._local.publish(folder)
        kept = self._local.kept(self._store.complete(), newest=self._name)
        for name in self._store.complete():
            if name not in kept:
                self._store.remove(name)

    def ended(self, folder: Path) -> None:
        if self._leads and folder.exists():  # nodes that share the folder have nothing left to do
            self._local.publish(folder)


def fetch(store: ObjectStore, checkpoint: str, local: RunFolder) -> Path:
    """The whole, sound checkpoint in this node's folder: from there where it is sound, else from the store.

    Raises `DamagedCheckpoint` if the store's own files differ from what was written.
    """
    target, temporary = local.path_of(step_of_name(checkpoint)), local.temporary(step_of_name(checkpoint))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    manifest = _fetch_manifest(store, checkpoint, temporary)
    for name in manifest.files:
        _take(store, checkpoint, name, target, temporary, manifest)
    try:
        raise_damage(temporary, [*find_gaps(manifest), *find_damage(temporary, manifest)])
    except DamagedCheckpoint as error:
        shutil.rmtree(temporary, ignore_errors=True)
        words = str(error).replace(str(temporary), f"{store.url}/{checkpoint}")
        raise DamagedCheckpoint(words) from None
    local.publish(temporary)
    return target


def _fetch_manifest(store: ObjectStore, checkpoint: str, folder: Path) -> Manifest:
    for name in (MANIFEST, DIGESTS):
        try:
            store.get(name, checkpoint, folder / name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{store.url}/{checkpoint}/{name} is missing.") from None
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        raise type(error)(str(error).replace(str(folder), f"{store.url}/{checkpoint}")) from None


def _take(store: ObjectStore, checkpoint: str, name: str, target: Path, folder: Path, manifest: Manifest) -> None:
    """Link the node's own file if it is sound, else download it. A missing one is found by the check that follows."""
    own = target / name
    if own.is_file() and not own.is_symlink() and not any(damage_in(target, name, manifest)):
        _link(own, folder / name)
        return
    try:
        store.get(name, checkpoint, folder / name)
    except FileNotFoundError:
        return


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # not every file system has links
        shutil.copyfile(file, target)
