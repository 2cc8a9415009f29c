"""Open foreign weights by name. Files are memory-mapped, so bytes are read only when used."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.checkpoint.deepspeed import TrainingState, find_deepspeed, open_deepspeed
from meshwright.checkpoint.folder import CHECKPOINTS, reading
from meshwright.checkpoint.formats import SAFETENSORS, TORCH
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.errors import CheckpointError, Unreadable, one_line
from meshwright.reading import Limits, read_json, refuse_special
from meshwright.units import MIB

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
LIMITS = Limits(bytes=256 * MIB, values=10_000_000, finite=False)
"""An index names every tensor; a transformers config may hold infinities."""
NESTED = ("state_dict", "model")

# What a folder may hold, in order of preference.
_INDEXES = (SAFETENSORS.index, TORCH.index)
_ALONE = (SAFETENSORS.alone, "pytorch_model.bin", TORCH.alone)


@dataclass(frozen=True)
class ForeignWeights:
    """Tensors of a foreign file or folder, by name."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    """Backed by the mapped files; do not write to them."""
    config: Mapping[str, Any] | None = None
    """`config.json` of a Hugging Face folder."""
    training: TrainingState | None = None
    """Training state of a DeepSpeed folder."""


def open_weights(path: Path) -> ForeignWeights:
    """Open a safetensors or torch file, a folder of them, or a DeepSpeed checkpoint."""
    with reading(path):
        if (step := find_deepspeed(path)) is not None:
            found = open_deepspeed(step)
            return ForeignWeights(path, found.tensors, training=found.training)
        if path.is_dir():
            return ForeignWeights(path, _read_folder(path), _read_config(path / "config.json"))
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; give a weights file or a Hugging Face folder.")
        return ForeignWeights(path, _read_file(path))


def _read_folder(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / MANIFEST).exists() or (folder / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{folder} is a Meshwright checkpoint; train --resume loads it as it is.")
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
            raise CheckpointError(f"{index} names the file {file!r}, which is not next to it.")
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


def _unpickle(path: Path) -> Any:
    """Load only tensors and plain containers: any other object in the file is refused before it can run."""
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _refuse_compressed(path)
        # Files older than torch 1.6 are not zip archives and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds a {foreign[1]}, but only tensors can be read; save only the model's state_dict."
            ) from None
        raise CheckpointError(f"{path} is not a valid torch file ({type(error).__name__}).") from None


def _refuse_compressed(path: Path) -> None:
    """Refuse compression: torch never compresses, and a compressed archive may expand to any size."""
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise CheckpointError(f"{path} is a compressed archive, which torch.save does not write; save it again.")


def _tensors_of(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """The state_dict, which may be nested in a dict next to other things."""
    if isinstance(content, dict):
        nested = [content[key] for key in NESTED if isinstance(content.get(key), dict)]
        content = nested[0] if len(nested) == 1 else content
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} has no state_dict of tensors: it holds a {type(content).__name__}.")
    for name, value in content.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise CheckpointError(f"{path} holds {name!r}, which is not a plain tensor; save only a state_dict.")
    return content


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense CPU tensor of a standard class, not quantized."""
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
        raise CheckpointError(f"{path} is not a JSON object.")
    return document
