"""Open a foreign checkpoint of any kind: its weights by name, and what it holds of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.folder import reading
from meshwright.checkpoint.foreign.dcp import is_dcp, read_dcp
from meshwright.checkpoint.foreign.deepspeed import find_deepspeed, open_deepspeed
from meshwright.checkpoint.foreign.document import read_document
from meshwright.checkpoint.foreign.folder import FSDP_WEIGHTS, read_fsdp_weights, read_training
from meshwright.checkpoint.foreign.training import TrainingState
from meshwright.checkpoint.foreign.weights import ADAPTERS, read_config, read_file, read_folder
from meshwright.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Source:
    """A foreign file or folder."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    """Weights by name, most of them backed by mapped files; do not write to them."""
    config: Mapping[str, Any] | None = None
    """`config.json` of a Hugging Face folder."""
    training: TrainingState | None = None
    is_adapter: bool = False
    """Whether it is a peft adapter without its base model."""


def open_source(path: Path) -> Source:
    """Open a safetensors or torch file, or a folder of any kind that can be imported."""
    with reading(path):
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; give a weights file or a checkpoint's folder.")
        if (step := find_deepspeed(path)) is not None:
            found = open_deepspeed(step)
            return Source(path, found.tensors, training=found.training)
        if is_dcp(path):
            document = read_document(path, read_dcp(path))
            return Source(path, document.tensors, training=document.training)
        if path.is_dir():
            return _open_folder(path)
        document = read_file(path)
        return Source(path, document.tensors, training=document.training)


def _open_folder(path: Path) -> Source:
    config = read_config(path / "config.json")
    if is_dcp(path / FSDP_WEIGHTS):
        return Source(path, read_fsdp_weights(path), config, read_training(path))
    document = read_folder(path)
    is_adapter = (path / ADAPTER_CONFIG).is_file() and any((path / name).is_file() for name in ADAPTERS)
    return Source(path, document.tensors, config, read_training(path) or document.training, is_adapter)
