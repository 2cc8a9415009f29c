"""Text that every machine with Python has: the source of its standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_stdlib(limit: int) -> Tensor:
    """The first `limit` bytes of the library's files, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class StdlibText(Dataset[dict[str, Tensor]]):
    """Windows of `length` bytes (x), each with the bytes that follow (y)."""

    def __init__(self, length: int, limit: int = 8_000_000) -> None:
        self.length = length
        self.text = read_stdlib(limit)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # Iteration stops at IndexError; without it, a slice past the end would only be shorter.
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return {"x": window[:-1], "y": window[1:]}
