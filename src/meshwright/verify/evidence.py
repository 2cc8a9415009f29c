"""Results of a few training steps, kept for a comparison and passed between processes as files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.facts.precision import FORMATS
from meshwright.torch_private.modules import REGISTERED
from meshwright.torch_private.trees import tree_leaves

State = dict[str, torch.Tensor]
ROUNDING = {"float64": 2.0**-53, **{word: one.rounding for word, one in FORMATS.items()}}
"""Unit roundoff: the largest relative error of one rounding."""


@dataclass(kw_only=True)
class Evidence:
    """Results of a few steps. Tensors are full, on the CPU, under the names of the unsplit model."""

    losses: list[float]
    norms: list[float]
    start: State = field(default_factory=dict)
    """Parameters and saved buffers before the first step."""
    kept: State = field(default_factory=dict)
    """Buffers that are not saved and plain tensor attributes, before the first step."""
    first: State = field(default_factory=dict)
    """Parameters and buffers after the first step, which still shows the cause of a difference."""
    last: State = field(default_factory=dict)
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    """For each micro-batch of the first step, the tensors of the model's output in the order of their pytree."""
    gradients: State | None = None
    """Of the first step, before clipping; parameters without a gradient are left out. None if they cannot be read."""
    smallest: State = field(default_factory=dict)
    """By element, the smallest absolute gradient over all steps; only in references."""
    copies: dict[int, str] = field(default_factory=dict)
    """By step (0: the start), a sentence about a rank's copy that differed from its peers'."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The training that strategies are compared with."""

    words: str
    """Its description for people."""
    precision: str
    """Of its arithmetic: float64, fp32, bf16 or fp16."""
    exact: Evidence
    disturbed: list[Evidence]
    """The same training, disturbed by rounding."""
    reduced_over: int = 1
    """Ranks whose gradients the compared strategy rounds to bf16 and sums in it; 1: none."""
    narrow: str | None = None
    """The precision that parts of it round to although it runs in float64."""
    note: str | None = None
    """Why it does not run in float64, or what rounds to a lower precision."""

    def save(self, path: Path) -> None:
        # As dicts, which `torch.load(weights_only=True)` reads.
        traces = {"exact": vars(self.exact), "disturbed": [vars(trace) for trace in self.disturbed]}
        torch.save({**vars(self), **traces}, path)

    @classmethod
    def load(cls, path: Path) -> Reference:
        document = torch.load(path, weights_only=True)
        disturbed = [Evidence(**one) for one in document["disturbed"]]
        return cls(**{**document, "exact": Evidence(**document["exact"]), "disturbed": disturbed})


def state_of(model: nn.Module) -> State:
    """Copies of all parameters and saved buffers; tied ones under each name."""
    return {name: _copy(tensor) for name, tensor in _saved(model)}


def kept_of(model: nn.Module) -> State:
    """Copies of what a state dict leaves out: buffers that are not saved, and tensors in plain attributes."""
    saved = {id(tensor) for _, tensor in _saved(model)}
    found = {f"{name} (not saved)": b for name, b in model.named_buffers() if id(b) not in saved}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in REGISTERED:
                continue
            for index, leaf in enumerate(tensors_in(value)):
                if id(leaf) not in saved and not isinstance(leaf, nn.Parameter):
                    found[f"{name}{'.' * bool(name)}{attribute} (attribute, tensor {index})"] = leaf
    return {name: _copy(tensor) for name, tensor in found.items()}


def gradients_of(model: nn.Module) -> State:
    """Copies of all gradients."""
    return {name: _copy(tensor.grad) for name, tensor in _saved(model) if tensor.grad is not None}


def outputs_of(output: Any) -> list[torch.Tensor]:
    return [_copy(leaf) for leaf in tensors_in(output)]


def _saved(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, t) for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if value is None or isinstance(value, bool | int | float | str | nn.Module):
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
