"""Folders that hold a model's weights and, next to them, files of the training: Accelerate's and the Trainer's.

| | Accelerate's `save_state` | Trainer's `checkpoint-N` |
| --- | --- | --- |
| weights | model.safetensors, pytorch_model.bin, or with an index | the same; adapter_model.safetensors |
| under FSDP | pytorch_model_fsdp_0/ (DCP), or pytorch_model_fsdp.bin | the same |
| optimizer | optimizer.bin; under FSDP also optimizer_0/ (DCP) | optimizer.pt; the same |
| schedule, loss scale | scheduler.bin, scaler.pt | scheduler.pt, scaler.pt |
| step | only the optimizer's own count | trainer_state.json |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.foreign.dcp import is_dcp, read_dcp
from meshwright.checkpoint.foreign.document import read_document
from meshwright.checkpoint.foreign.optimizer import read_optimizer
from meshwright.checkpoint.foreign.training import TrainingState, scale_of
from meshwright.checkpoint.foreign.unpickle import unpickle
from meshwright.checkpoint.foreign.weights import ADAPTERS, INDEXES, WEIGHT_FILES, read_json
from meshwright.errors import CheckpointError

FSDP_WEIGHTS, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
TRAINER_STATE = "trainer_state.json"
OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
SCHEDULES = ("scheduler.bin", "scheduler.pt")
SCALER = "scaler.pt"
_SECOND = ("model_1.safetensors", "pytorch_model_1.bin", "optimizer_1.bin", "pytorch_model_fsdp_1", "optimizer_1")
# Describe the model or the run for people and tokenizers; they hold no state.
_DESCRIBE = frozenset(
    {
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "added_tokens.json",
        "spiece.model",
        "tokenizer.model",
        "preprocessor_config.json",
        "processor_config.json",
        "chat_template.jinja",
        "training_args.bin",
        ".gitattributes",
    }
)


def read_fsdp_weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_document(folder / FSDP_WEIGHTS, read_dcp(folder / FSDP_WEIGHTS)).tensors


def read_training(folder: Path) -> TrainingState | None:
    """The training's files; None if there is none of them. Files that are not read are listed."""
    if second := next((name for name in _SECOND if (folder / name).exists()), None):
        raise CheckpointError(f"{folder} holds several models or optimizers ({second}); a job has one of each.")
    optimizer = _optimizer(folder)
    schedule = next((folder / name for name in SCHEDULES if (folder / name).is_file()), None)
    scaler = folder / SCALER
    training = TrainingState(
        step=_step(folder),
        schedule=None if schedule is None else _mapping(schedule),
        loss_scale=scale_of(_mapping(scaler)) if scaler.is_file() else None,
        left_out=tuple(sorted(path.name for path in folder.iterdir() if not _is_known(path.name))),
        **({} if optimizer is None else read_optimizer(optimizer, f"The optimizer of {folder}")),
    )
    return None if training.is_empty and training.step is None else training


def _optimizer(folder: Path) -> Any:
    if is_dcp(folder / FSDP_OPTIMIZER):
        return read_dcp(folder / FSDP_OPTIMIZER).get("optimizer")
    found = next((folder / name for name in OPTIMIZERS if (folder / name).is_file()), None)
    return None if found is None else unpickle(found)


def _step(folder: Path) -> int | None:
    if not (folder / TRAINER_STATE).is_file():
        return None
    step = read_json(folder / TRAINER_STATE).get("global_step")
    return step if type(step) is int and step >= 0 else None


def _mapping(path: Path) -> Mapping[str, Any]:
    content = unpickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state_dict.")
    return content


def _is_known(name: str) -> bool:
    read = {*OPTIMIZERS, *SCHEDULES, SCALER, TRAINER_STATE, FSDP_WEIGHTS, FSDP_OPTIMIZER, *INDEXES, *ADAPTERS}
    is_weights = name in WEIGHT_FILES or (name.startswith(("model-", "pytorch_model-")) and "-of-" in name)
    return name in read or name in _DESCRIBE or is_weights
