"""Check that a checkpoint's files are what was written: complete, no unknown files, every byte the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, Manifest, digest_of_file
from meshwright.checkpoint.progress import Advance
from meshwright.checkpoint.storage import BLOCK
from meshwright.errors import DamagedCheckpoint


@dataclass(frozen=True)
class Damage:
    """One problem with a file, and the tensors that it affects."""

    file: str
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.tensors:
            return f"{self.file} {self.what}"
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return f"{self.file} {self.what}: {', '.join(self.tensors[:3])}{more}"


def find_damage(
    folder: Path, manifest: Manifest, files: Iterable[str] | None = None, advance: Advance = lambda size: None
) -> list[Damage]:
    """Every problem; with `files`, only those are read, but all must exist."""
    found = list(find_wrong_files(folder, manifest))
    for name in manifest.files if files is None else files:
        found += damage_in(folder, name, manifest, advance)
    return found


def raise_damage(folder: Path, damage: list[Damage]) -> None:
    if damage:
        more = f" ({len(damage) - 1} more)" if len(damage) > 1 else ""
        raise DamagedCheckpoint(f"The checkpoint {folder} is damaged: {damage[0]}{more}.")


def find_wrong_files(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """Files that are missing, unknown, or not regular files."""
    present = {path.name for path in folder.iterdir()}
    expected = {*manifest.files, MANIFEST, DIGESTS}
    for name in sorted(expected - present):
        tensors = _once(tensor for tensor, _, _ in manifest.chunks_in(name))
        yield Damage(name, "is missing, and with it", tensors)
    for name in sorted(present - expected):
        yield Damage(name, "does not belong to it")
    for name in sorted(expected & present):
        if not (folder / name).is_file() or (folder / name).is_symlink():
            yield Damage(name, "is not a regular file")


def damage_in(folder: Path, name: str, manifest: Manifest, advance: Advance) -> Iterator[Damage]:
    """Problems with a file that exists."""
    if not (folder / name).is_file():
        return
    expected, chunks = manifest.files[name], manifest.chunks_in(name)
    size = (folder / name).stat().st_size
    if size != expected.bytes:
        damaged = [tensor for tensor, entry, chunk in chunks if chunk.at + entry.bytes_of(chunk) > size]
        yield Damage(name, f"has {size} bytes instead of {expected.bytes}", _once(damaged))
        return
    buffer = bytearray(BLOCK)
    # Read instead of mapped: an unreadable disk sector then raises an error instead of killing the process.
    with (folder / name).open("rb", buffering=0) as file:
        header = _sha256(file, chunks[0][2].at if chunks else size, buffer)
        damaged = []
        for tensor, entry, chunk in chunks:
            if _sha256(file, entry.bytes_of(chunk), buffer) != chunk.sha256:
                damaged.append(tensor)
            advance(entry.bytes_of(chunk))
    if damaged:
        yield Damage(name, "is not what was written", _once(damaged))
    if digest_of_file(header, (chunk.sha256 for _, _, chunk in chunks)) != expected.sha256:
        yield Damage(name, "is not what was written (its header)")


def _sha256(file: FileIO, length: int, buffer: bytearray) -> str:
    """Digest of the next `length` bytes."""
    digest, view = hashlib.sha256(), memoryview(buffer)
    while length and (count := file.readinto(view[: min(length, len(view))])):
        digest.update(view[:count])
        length -= count
    return digest.hexdigest()


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
