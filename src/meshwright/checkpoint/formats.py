"""Weight files for other tools: safetensors and torch, one file or several with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from meshwright.checkpoint.progress import Advance
from meshwright.checkpoint.storage import BLOCK, flush, header_of, tensor_bytes


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor to write, under one name, or under several that share its memory."""

    names: tuple[str, ...]
    source: str
    """Its key in the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Read = Callable[[Item], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a format names and writes its files."""

    alone: str
    """File name if there is only one."""
    numbered: str
    index: str
    shares: bool
    """Whether several names can share memory."""
    write: Callable[[Path, list[Item], Read, Advance], None]

    def file_names(self, count: int) -> list[str]:
        return [self.alone] if count == 1 else [self.numbered.format(n + 1, count) for n in range(count)]


def write_safetensors(path: Path, items: list[Item], read: Read, advance: Advance) -> None:
    """Write tensor by tensor: only one is in memory at a time."""
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # aligns every tensor to its element size
    with path.open("wb") as file:
        file.write(header_of([(item.names[0], item.dtype, item.shape) for item in ordered]))
        for item in ordered:
            content = tensor_bytes(read(item))
            for start in range(0, len(content), BLOCK):
                advance(file.write(content[start : start + BLOCK]))
        flush(file)


def write_torch(path: Path, items: list[Item], read: Read, advance: Advance) -> None:
    """Write one dict, which `torch.load(weights_only=True)` reads; all of it is in memory at once."""
    tensors = {}
    for item in items:
        tensors.update(dict.fromkeys(item.names, read(item)))
    with path.open("wb") as file:
        torch.save(tensors, file)
        flush(file)
    advance(sum(item.bytes for item in items))


SAFETENSORS = Format(
    alone="model.safetensors",
    numbered="model-{:05d}-of-{:05d}.safetensors",
    index="model.safetensors.index.json",
    shares=False,
    write=write_safetensors,
)
TORCH = Format(
    alone="model.pt",
    numbered="pytorch_model-{:05d}-of-{:05d}.bin",
    index="pytorch_model.bin.index.json",
    shares=True,
    write=write_torch,
)


def pack(items: Iterable[Item], limit: int) -> list[list[Item]]:
    """Split into shards of at most `limit` bytes, in order; a larger tensor gets its own shard."""
    shards: list[list[Item]] = []
    room = 0
    for item in items:
        if not shards or item.bytes > room:
            shards.append([])
            room = limit
        shards[-1].append(item)
        room -= item.bytes
    return shards


def index_of(shards: dict[str, list[Item]]) -> str:
    """The text of an index file, which maps each name to its file."""
    where = {name: file for file, items in shards.items() for item in items for name in item.names}
    size = sum(item.bytes for items in shards.values() for item in items)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
