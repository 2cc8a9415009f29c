"""Read whole tensors from a checkpoint, one at a time, in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.checkpoint.manifest import Manifest, read_manifest
from meshwright.checkpoint.storage import MappedFiles, narrowed


class WholeTensors:
    """A checkpoint's tensors, unsharded. Only the mapped files are kept in memory."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or read_manifest(folder)
        self._files = MappedFiles(folder)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, joined from its chunks; do not write to it."""
        entry = self.manifest.tensors[name]
        if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape:
            return self._files.tensor(entry, entry.chunks[0])
        whole = torch.empty(entry.shape, dtype=entry.torch_dtype)
        for chunk in entry.chunks:
            narrowed(whole, chunk.offsets, chunk.sizes).copy_(self._files.tensor(entry, chunk))
        return whole
