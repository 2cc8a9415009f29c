"""Whether a checkpoint's files are what was written: complete, nothing foreign among them, every byte the same."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, Manifest
from meshwright.checkpoint.storage import BLOCK
from meshwright.errors import DamagedCheckpoint


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a file, and the tensors that it hurts."""

    file: str
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.tensors:
            return f"{self.file} {self.what}"
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return f"{self.file} {self.what}: {', '.join(self.tensors[:3])}{more}"


def find_damage(folder: Path, manifest: Manifest, files: Iterable[str] | None = None) -> list[Damage]:
    """All that is wrong; with `files`, only those are read (but all must be there)."""
    found = list(_strangers(folder, manifest))
    for name in manifest.files if files is None else files:
        if (folder / name).is_file():
            found += _damage_of(folder, name, manifest)
    return found


def raise_damage(folder: Path, damage: list[Damage]) -> None:
    if damage:
        more = f" ({len(damage) - 1} more)" if len(damage) > 1 else ""
        raise DamagedCheckpoint(f"The checkpoint {folder} is damaged: {damage[0]}{more}.")


def _strangers(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    there = {path.name for path in folder.iterdir()}
    expected = {*manifest.files, MANIFEST, DIGESTS}
    for name in sorted(expected - there):
        yield Damage(name, "is missing, with it", _tensors_in(name, manifest))
    for name in sorted(there - expected):
        yield Damage(name, "does not belong to it")
    for name in sorted(expected & there):
        if not (folder / name).is_file() or (folder / name).is_symlink():
            yield Damage(name, "is no plain file")


def _damage_of(folder: Path, name: str, manifest: Manifest) -> Iterator[Damage]:
    path, expected = folder / name, manifest.files[name]
    size = path.stat().st_size
    if size != expected.bytes:
        hurt = tuple(t for t, at, length in _places(name, manifest) if at + length > size)
        yield Damage(name, f"has {size} bytes instead of {expected.bytes}", hurt)
    elif _sha256(path) != expected.sha256:
        hurt = tuple(_hurt(path, name, manifest))
        yield Damage(name, "is not what was written" + ("" if hurt else " (its header)"), hurt)


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hurt(path: Path, name: str, manifest: Manifest) -> Iterator[str]:
    with path.open("rb") as file:
        for tensor, entry in manifest.tensors.items():
            for chunk in entry.chunks:
                if chunk.file == name:
                    file.seek(chunk.at)
                    if _crc(file.read, entry.bytes_of(chunk)) != chunk.crc:
                        yield tensor


def _crc(read: Callable[[int], bytes], length: int) -> int:
    crc = 0
    while length and (block := read(min(BLOCK, length))):
        crc = zlib.crc32(block, crc)
        length -= len(block)
    return crc


def _places(name: str, manifest: Manifest) -> Iterator[tuple[str, int, int]]:
    for tensor, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            if chunk.file == name:
                yield tensor, chunk.at, entry.bytes_of(chunk)


def _tensors_in(name: str, manifest: Manifest) -> tuple[str, ...]:
    return tuple(tensor for tensor, _, _ in _places(name, manifest))
