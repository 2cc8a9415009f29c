"""Weights that others wrote, by their names. Files are mapped, so no byte is read before it is asked for."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.checkpoint.aside import reading
from meshwright.checkpoint.deepspeed import TrainingState, find_deepspeed, open_deepspeed
from meshwright.checkpoint.folder import CHECKPOINTS
from meshwright.checkpoint.formats import SAFETENSORS, TORCH
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.errors import CheckpointError, Unreadable, one_line
from meshwright.reading import Limits, read_json, refuse_special
from meshwright.units import MIB

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
LIMITS = Limits(bytes=256 * MIB, values=10_000_000, finite=False)
"""An index names every tensor; a config of transformers may hold infinities."""
NESTED = ("state_dict", "model")

# What a folder may hold, best first.
_INDEXES = (SAFETENSORS.index, TORCH.index)
_ALONE = (SAFETENSORS.alone, "pytorch_model.bin", TORCH.alone)


@dataclass(frozen=True)
class Source:
    """Somebody else's weights."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    """Over the files' own pages; not to be written to."""
    config: Mapping[str, Any] | None = None
    """`config.json` of a folder of Hugging Face."""
    training: TrainingState | None = None
    """Of a folder of DeepSpeed's."""


def open_source(path: Path) -> Source:
    """A file of safetensors or torch, or a folder of them, or a checkpoint of DeepSpeed's."""
    with reading(path):
        if (step := find_deepspeed(path)) is not None:
            found = open_deepspeed(step)
            return Source(path, found.tensors, training=found.training)
        if path.is_dir():
            return Source(path, _read_folder(path), _read_config(path / "config.json"))
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; give a file of weights or a folder of Hugging Face.")
        return Source(path, _read_file(path))


def _read_folder(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / MANIFEST).exists() or (folder / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{folder} is of Meshwright's own making; train --resume takes it as it is.")
    for name in (*_INDEXES, *_ALONE):
        if (folder / name).is_file():
            return _read_indexed(folder / name) if name in _INDEXES else _read_file(folder / name)
    raise CheckpointError(f"{folder} holds no weights: it has none of {', '.join((*_INDEXES, *_ALONE))}.")


def _read_indexed(index: Path) -> dict[str, torch.Tensor]:
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index} has no weight_map from names to files.")
    found: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(where.values()):
        if Path(file).name != file or not (index.parent / file).is_file():
            raise CheckpointError(f"{index} names the file {file!r}, which is not beside it.")
        found |= _read_file(index.parent / file)
    if lost := next((name for name in where if name not in found), None):
        raise CheckpointError(f"{index} says that {lost} is in {where[lost]}, where it is not.")
    return found


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    refuse_special(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in PICKLED:
        return _tensors_of(path, _unpickle(path))
    raise CheckpointError(f"{path} is no file of weights: the name must end in .safetensors, {', '.join(PICKLED)}.")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no sound file of safetensors: {one_line(error)}") from None
    if not found:
        raise CheckpointError(f"{path} holds no tensors.")
    return found


def _unpickle(path: Path) -> Any:
    """Only tensors and plain containers: anything else in the file is refused before it can run."""
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _refuse_compressed(path)
        # Files older than torch 1.6 are no zip archives and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign is not None:
            raise CheckpointError(
                f"{path} holds a {foreign[1]}, and only tensors are read; save the model's state_dict by itself."
            ) from None
        raise CheckpointError(f"{path} is no sound file of torch ({type(error).__name__}).") from None


def _refuse_compressed(path: Path) -> None:
    """torch compresses nothing, and what is compressed may become any size."""
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise CheckpointError(f"{path} is a compressed archive, which torch.save does not write; save it anew.")


def _tensors_of(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """A state_dict, or the one that lies in a dict beside other things."""
    if isinstance(content, dict):
        nested = [content[key] for key in NESTED if isinstance(content.get(key), dict)]
        content = nested[0] if len(nested) == 1 else content
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} holds no state_dict, but {type(content).__name__}.")
    for name, value in content.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise CheckpointError(f"{path} holds {name!r}, which is no plain tensor; save a state_dict by itself.")
    return content


def _is_plain(value: Any) -> bool:
    """Neither sparse nor quantized, nor without memory, nor of a class that stands for something else."""
    kind = type(value) in (torch.Tensor, torch.nn.Parameter)
    return kind and value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized


def _read_config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    config = _read_json(path)
    return config if config.keys() & {"model_type", "architectures"} else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path, LIMITS)
    except Unreadable as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return document
