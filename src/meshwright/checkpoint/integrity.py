"""Check a whole checkpoint in one process: every file's bytes, and whether its boxes cover whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path

from meshwright.checkpoint.file_integrity import Damage, damage_in, find_wrong_files
from meshwright.checkpoint.manifest import MANIFEST, Chunk, Entry, Manifest
from meshwright.checkpoint.progress import Progress, silent

MOST_CORNERS = 1 << 24  # limit per tensor; no strategy shards more than three dims
READERS = 4  # files hashed at a time: one thread cannot keep up with a fast disk


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
