"""All of a checkpoint looked at by one process: every file's bytes, and whether its boxes make up whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch

from meshwright.checkpoint.manifest import MANIFEST, Chunk, Entry, Manifest
from meshwright.checkpoint.progress import Progress, silent
from meshwright.checkpoint.soundness import Damage, find_damage

READERS = 4  # files that are hashed at a time: one thread does not keep up with a fast disk


def inspect(folder: Path, manifest: Manifest, progress: Progress = silent) -> list[Damage]:
    """All that is wrong with a checkpoint."""
    found = [*find_gaps(manifest), *find_damage(folder, manifest, ())]
    with progress(f"checking {folder.name}", manifest.bytes) as advance, ThreadPoolExecutor(READERS) as pool:
        for damage in pool.map(lambda name: find_damage(folder, manifest, [name], saw=advance), manifest.files):
            found += damage
    return list(dict.fromkeys(found))


def find_gaps(manifest: Manifest) -> Iterator[Damage]:
    """Tensors that are not whole, however sound the files are; from the manifest alone."""
    for name, entry in manifest.tensors.items():
        if outside := next((chunk for chunk in entry.chunks if not _within(entry, chunk, manifest)), None):
            yield Damage(outside.file, "is said to hold a box that it cannot hold", (name,))
        elif not _is_covered(entry):
            yield Damage(MANIFEST, "lists boxes that do not make up the whole", (name,))


def _within(entry: Entry, chunk: Chunk, manifest: Manifest) -> bool:
    """The box lies in the tensor, and its bytes in the file."""
    sides = len(chunk.offsets) == len(chunk.sizes) == len(entry.shape)
    boxed = sides and all(
        min(offset, size) >= 0 and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
    )
    return boxed and 0 <= chunk.at <= manifest.files[chunk.file].bytes - entry.bytes_of(chunk)


def _is_covered(entry: Entry) -> bool:
    """As many elements in boxes as in the tensor, and none of them in two."""
    if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.shape):
        return False
    boxes = [chunk for chunk in entry.chunks if prod(chunk.sizes)]
    if len(boxes) < 2:
        return True
    starts = torch.tensor([chunk.offsets for chunk in boxes])
    ends = starts + torch.tensor([chunk.sizes for chunk in boxes])
    overlap = ((starts[:, None] < ends[None]) & (starts[None] < ends[:, None])).all(-1)
    return int(overlap.sum()) == len(boxes)  # each with itself only
