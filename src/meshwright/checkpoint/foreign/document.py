"""What a training script saves: a dict of weights, optimizer, schedule and counters, under the usual spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.foreign.optimizer import read_optimizer
from meshwright.checkpoint.foreign.training import TrainingState, scale_of
from meshwright.errors import CheckpointError

# Spellings, compared in lower case.
WEIGHTS = frozenset(
    {
        "model",
        "state_dict",
        "model_state_dict",
        "model_state",
        "module",
        "net",
        "network",
        "weights",
        "model_weights",
        "net_state_dict",
    }
)
OPTIMIZER = frozenset(
    {
        "optimizer",
        "optim",
        "opt",
        "optimizer_state_dict",
        "optimizer_state",
        "optim_state_dict",
        "optim_state",
        "optimizer_states",
        "optimizers",
    }
)
SCHEDULE = frozenset(
    {
        "scheduler",
        "lr_scheduler",
        "schedule",
        "sched",
        "lr_sched",
        "scheduler_state_dict",
        "lr_scheduler_state_dict",
        "scheduler_state",
        "lr_scheduler_state",
        "lr_schedulers",
        "schedulers",
    }
)
SCALER = frozenset({"scaler", "grad_scaler", "scaler_state_dict", "scaler_state", "amp_scaler", "mixedprecision"})
STEP = frozenset(
    {"step", "steps", "global_step", "global_steps", "iter", "iteration", "iterations", "iter_num", "num_updates"}
)
PROGRESS = frozenset({"train_state"})
"""A nested dict of counters, as torchtitan saves them."""


@dataclass(frozen=True)
class Document:
    """The parts of a training script's file."""

    tensors: dict[str, torch.Tensor]
    training: TrainingState | None


def read_document(path: Path, content: Any) -> Document:
    """Find the parts of a file; everything else is listed in `left_out`."""
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} has no state_dict of tensors: it holds a {type(content).__name__}.")
    if all(is_plain(value) for value in content.values()):
        return Document(_state_dict(path, content), None)
    nested = _find(content, WEIGHTS, Mapping)
    if len(nested) > 1:
        raise CheckpointError(
            f"{path} holds weights under {' and '.join(map(repr, nested))}; save the state_dict of one model."
        )
    tensors = content[nested[0]] if nested else _weights_at_top(content)
    parts = {key: value for key, value in content.items() if key not in nested and key not in tensors}
    return Document(_state_dict(path, tensors), _read_training(path, parts))


def _weights_at_top(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Weights next to an optimizer, as torchtitan saves them; without one, all must be weights."""
    if not _find(content, OPTIMIZER, Mapping):
        return dict(content)
    counters = _find(content, STEP, torch.Tensor)
    return {key: value for key, value in content.items() if is_plain(value) and key not in counters}


def _read_training(path: Path, parts: Mapping[Any, Any]) -> TrainingState | None:
    taken: list[Any] = []

    def take(names: frozenset[str], kind: Any) -> Any:
        found = _find(parts, names, kind)
        taken.extend(found[:1])
        return parts[found[0]] if found else None

    optimizer = _only(path, take(OPTIMIZER, Mapping | list), "optimizers")
    schedule = _only(path, take(SCHEDULE, Mapping | list), "schedules")
    scaler = take(SCALER, Mapping)
    progress = take(PROGRESS, Mapping) or {}
    step = number(take(STEP, int | torch.Tensor)) if _find(parts, STEP, int | torch.Tensor) else None
    if step is None and (counters := _find(progress, STEP, int | torch.Tensor)):
        step = number(progress[counters[0]])
    return TrainingState(
        step=step,
        schedule=schedule or None,
        loss_scale=scale_of(scaler) if scaler else None,
        left_out=tuple(str(key) for key in parts if key not in taken),
        **(read_optimizer(optimizer, f"The optimizer of {path}") if optimizer else {}),
    )


def _only(path: Path, found: Any, what: str) -> Any:
    """The only one of a list: a run has one optimizer and one schedule."""
    if not isinstance(found, list):
        return found
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds {len(found)} {what}, but a job has one; import only the weights (--weights-only)."
        )
    return found[0] if found else None


def _find(content: Mapping[Any, Any], names: frozenset[str], kind: Any) -> list[Any]:
    """Keys with one of these spellings, whose value is of a kind."""
    return [k for k, value in content.items() if isinstance(k, str) and k.lower() in names and isinstance(value, kind)]


def number(value: Any) -> int | None:
    """A counter, which may be a tensor."""
    if torch.is_tensor(value):
        return int(value) if value.numel() == 1 else None
    return value if type(value) is int else None


def _state_dict(path: Path, content: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    if not content:
        raise CheckpointError(f"{path} has no state_dict of tensors: it holds no weights.")
    for name, value in content.items():
        if not isinstance(name, str) or not is_plain(value):
            raise CheckpointError(
                f"{path} holds {name!r}, which is not a plain tensor; save only a state_dict, or put it under "
                "'model' next to 'optimizer', 'scheduler' and 'step'."
            )
    return dict(content)


def is_plain(value: Any) -> bool:
    """Whether a value is a dense CPU tensor of a standard class, not quantized."""
    kind = type(value) in (torch.Tensor, torch.nn.Parameter)
    return kind and value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
