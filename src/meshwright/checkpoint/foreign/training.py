"""The training state of a foreign checkpoint: its optimizer, schedule and progress, in the words of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Slots = Mapping[str, Any]
"""Optimizer state of one parameter by key: tensors and numbers, or `HeldParts` of a tensor that was sharded."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything a run needs to continue, other than weights."""

    step: int | None = None
    """Optimizer steps taken; None if the source does not say."""
    samples: int | None = None
    strategy: str = "single"
    """What wrote it, as a strategy."""
    ranks: int = 1
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's hyperparameters, by group; empty if the source has no optimizer."""
    names: list[list[str]] | None = None
    """Parameters of each group; None if they are only numbered."""
    slots: dict[str, Slots] = field(default_factory=dict)
    """By parameter; empty if names are not known."""
    numbered: list[list[Slots]] = field(default_factory=list)
    """Replaces `slots` if names are not known: by group and place in it."""
    masters: list[torch.Tensor] = field(default_factory=list)
    """fp32 weights of the numbered parameters, if the model's are in lower precision."""
    schedule: Mapping[str, Any] | None = None
    loss_scale: dict[str, float] | None = None
    left_out: tuple[str, ...] = ()
    """What the source holds and this does not."""

    @property
    def is_empty(self) -> bool:
        return not self.groups and self.schedule is None and self.loss_scale is None


def scale_of(scaler: Mapping[str, Any]) -> dict[str, float] | None:
    """A GradScaler's state as ours; None if it is switched off, or does not say its scale."""
    if "scale" not in scaler:
        return None
    return {
        "value": float(scaler["scale"]),
        "growth": float(scaler.get("growth_factor", 2.0)),
        "interval": int(scaler.get("growth_interval", 2000)),
        "steps_since": int(scaler.get("_growth_tracker", 0)),
    }


def scaler_of(scale: Mapping[str, float]) -> dict[str, Any]:
    """Our loss scale as the state of a GradScaler."""
    return {
        "scale": float(scale["value"]),
        "growth_factor": float(scale["growth"]),
        "backoff_factor": 1.0 / float(scale["growth"]),
        "growth_interval": int(scale["interval"]),
        "_growth_tracker": int(scale["steps_since"]),
    }
