"""Files and folders of weights by name. Files are memory-mapped, so bytes are read only when used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.checkpoint.folder import CHECKPOINTS
from meshwright.checkpoint.foreign.document import Document, read_document
from meshwright.checkpoint.foreign.unpickle import unpickle
from meshwright.checkpoint.formats import SAFETENSORS, TORCH
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.errors import CheckpointError, Unreadable, one_line
from meshwright.reading import Limits, refuse_special
from meshwright.reading import read_json as read_any_json
from meshwright.units import MIB

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
LIMITS = Limits(bytes=256 * MIB, values=10_000_000, finite=False)
"""An index names every tensor; a transformers config may hold infinities."""

# What a folder may hold, in order of preference.
INDEXES = (SAFETENSORS.index, TORCH.index)
ALONE = (SAFETENSORS.alone, "pytorch_model.bin", TORCH.alone, "pytorch_model_fsdp.bin")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHT_FILES = frozenset((*ALONE, *ADAPTERS))


def read_folder(folder: Path) -> Document:
    """A folder of weight files, with or without an index."""
    if (folder / MANIFEST).exists() or (folder / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{folder} is a Meshwright checkpoint; train --resume loads it as it is.")
    for name in (*INDEXES, *ALONE, *ADAPTERS):
        if (folder / name).is_file():
            return Document(_read_indexed(folder / name), None) if name in INDEXES else read_file(folder / name)
    raise CheckpointError(f"{folder} holds no weights: it has none of {', '.join((*INDEXES, *ALONE, *ADAPTERS))}.")


def _read_indexed(index: Path) -> dict[str, torch.Tensor]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index} has no weight_map from names to files.")
    found: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(where.values()):
        if Path(file).name != file or not (index.parent / file).is_file():
            raise CheckpointError(f"{index} names the file {file!r}, which is not next to it.")
        found |= read_file(index.parent / file).tensors
    if lost := next((name for name in where if name not in found), None):
        raise CheckpointError(f"{index} says that {lost} is in {where[lost]}, where it is not.")
    return found


def read_file(path: Path) -> Document:
    """A file of weights; a torch file may also hold the training's state."""
    refuse_special(path)
    if path.suffix == ".safetensors":
        return Document(_read_safetensors(path), None)
    if path.suffix in PICKLED:
        return read_document(path, unpickle(path))
    raise CheckpointError(f"{path} is not a weights file: its name must end in .safetensors, {', '.join(PICKLED)}.")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a valid safetensors file: {one_line(error)}") from None
    if not found:
        raise CheckpointError(f"{path} holds no tensors.")
    return found


def read_config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    config = read_json(path)
    return config if config.keys() & {"model_type", "architectures"} else None


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = read_any_json(path, LIMITS)
    except Unreadable as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return document
