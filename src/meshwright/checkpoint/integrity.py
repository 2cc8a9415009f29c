"""Check that a checkpoint is what was written: all files, no unknown ones, every byte, and boxes that cover tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path

from meshwright.checkpoint.manifest import DIGESTS, MANIFEST, Chunk, Entry, Manifest, digest_of_file
from meshwright.checkpoint.progress import Advance, Progress, silent
from meshwright.checkpoint.storage import BLOCK
from meshwright.errors import DamagedCheckpoint

MOST_CORNERS = 1 << 24  # limit per tensor; no strategy shards more than three dims
READERS = 4  # files hashed at a time: one thread cannot keep up with a fast disk


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


def find_damage(folder: Path, manifest: Manifest, files: Iterable[str] | None = None) -> list[Damage]:
    """Every problem; with `files`, only those are read, but all must exist."""
    found = list(find_wrong_files(folder, manifest))
    for name in manifest.files if files is None else files:
        found += damage_in(folder, name, manifest)
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


def damage_in(folder: Path, name: str, manifest: Manifest, advance: Advance = lambda size: None) -> Iterator[Damage]:
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


def inspect(folder: Path, manifest: Manifest, progress: Progress = silent) -> list[Damage]:
    """Everything that is wrong with a checkpoint."""
    found = [*find_gaps(manifest), *find_wrong_files(folder, manifest)]
    with progress(f"checking {folder.name}", manifest.bytes) as advance, ThreadPoolExecutor(READERS) as pool:
        for damage in pool.map(lambda name: list(damage_in(folder, name, manifest, advance)), manifest.files):
            found += damage
    return list(dict.fromkeys(found))


def find_gaps(manifest: Manifest) -> Iterator[Damage]:
    """Tensors that the manifest's boxes do not cover exactly; the files are not read."""
    for name, entry in manifest.tensors.items():
        if outside := next((chunk for chunk in entry.chunks if not _within(entry, chunk, manifest)), None):
            yield Damage(outside.file, "is listed with a box that it cannot hold", (name,))
        elif not _is_covered(entry):
            yield Damage(MANIFEST, "lists boxes that do not cover the tensor", (name,))


def _within(entry: Entry, chunk: Chunk, manifest: Manifest) -> bool:
    """Whether the box is inside the tensor, and its bytes inside the file."""
    same_dims = len(chunk.offsets) == len(chunk.sizes) == len(entry.shape)
    inside = same_dims and all(
        min(offset, size) >= 0 and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
    )
    return inside and 0 <= chunk.at <= manifest.files[chunk.file].bytes - entry.bytes_of(chunk)


def _is_covered(entry: Entry) -> bool:
    """Whether every element of the tensor is in exactly one box.

    A box's indicator function is given by its corners with alternating signs, so the boxes add up to the tensor if and
    only if their signed corners do. That is linear in the number of boxes; comparing them pairwise is quadratic.
    """
    if not prod(entry.shape):
        return True
    boxes = [chunk for chunk in entry.chunks if prod(chunk.sizes)]
    # All boxes span the other dims.
    split = [dim for dim, whole in enumerate(entry.shape) if any(chunk.sizes[dim] != whole for chunk in boxes)]
    if len(boxes) << len(split) > MOST_CORNERS:
        return False
    signs: Counter[tuple[int, ...]] = Counter()
    for chunk in boxes:
        _add_corners(signs, [(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for dim in split], 1)
    _add_corners(signs, [(0, entry.shape[dim]) for dim in split], -1)
    return not any(signs.values())


def _add_corners(signs: Counter[tuple[int, ...]], sides: list[tuple[int, int]], sign: int) -> None:
    for ends in product((0, 1), repeat=len(sides)):
        corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
        signs[corner] += sign if sum(ends) % 2 == 0 else -sign
