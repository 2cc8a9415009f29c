"""What a few training steps leave behind for a comparison, and how it travels between processes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.facts.precision import BUILT, FORMATS
from meshwright.torch_private.modules import REGISTERED
from meshwright.torch_private.trees import tree_leaves

State = dict[str, torch.Tensor]
ROUNDING = {"float64": 2.0**-53, **{word: FORMATS[word].rounding for word in BUILT}}
"""Unit roundoff: the largest relative error of one rounding."""


@dataclass(kw_only=True)
class Evidence:
    """What a few steps left behind. Tensors are whole, on the CPU, under the unsplit model's names."""

    losses: list[float]
    norms: list[float]
    start: State = field(default_factory=dict)
    """Parameters and saved buffers before the first step."""
    kept: State = field(default_factory=dict)
    """Buffers that are not saved and plain tensor attributes, before the first step."""
    first: State = field(default_factory=dict)
    """Parameters and buffers after the first step: where the cause of a difference is still to be seen."""
    last: State = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Tensors of the first step's model outputs, in the order of their pytree."""
    gradients: State | None = None
    """Of the first step, before clipping; a parameter without one is not in it. None where nobody could read them."""
    smallest: State = field(default_factory=dict)
    """By element, the smallest size of the gradient over all steps; of references only."""
    copies: dict[int, str] = field(default_factory=dict)
    """After which steps, 0 being the start, a rank's copy of something was not its peers', as sentences."""

    def to_plain(self) -> dict[str, Any]:
        """As a dict that `torch.save` writes and `torch.load(weights_only=True)` reads."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What strategies are compared with."""

    words: str
    """What it is, for people."""
    precision: str
    """Of its arithmetic: float64, fp32, bf16 or fp16."""
    exact: Evidence
    disturbed: list[Evidence]
    """The same training, disturbed by rounding."""
    narrow: str | None = None
    """The precision that some of it rounds to although it runs in float64."""
    note: str | None = None
    """Why it does not run in float64, or what rounds to less."""

    def save(self, path: Path) -> None:
        document = {one.name: getattr(self, one.name) for one in fields(self)}
        traces = {"exact": self.exact.to_plain(), "disturbed": [trace.to_plain() for trace in self.disturbed]}
        torch.save({**document, **traces}, path)

    @classmethod
    def load(cls, path: Path) -> Reference:
        document = torch.load(path, weights_only=True)
        traces = {
            "exact": Evidence(**document["exact"]),
            "disturbed": [Evidence(**one) for one in document["disturbed"]],
        }
        return cls(**{**document, **traces})


def state_of(model: nn.Module) -> State:
    """A copy of every parameter and saved buffer; tied ones under each name."""
    return {name: _copy(tensor) for name, tensor in _saved(model)}


def kept_of(model: nn.Module) -> State:
    """A copy of what a state dict leaves out: buffers that are not saved, and tensors in plain attributes."""
    saved = {id(tensor) for _, tensor in _saved(model)}
    found = {f"{name} (not saved)": b for name, b in model.named_buffers() if id(b) not in saved}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in REGISTERED:
                continue
            for index, leaf in enumerate(_tensors_in(value)):
                if id(leaf) not in saved and not isinstance(leaf, nn.Parameter):
                    found[f"{name}{'.' * bool(name)}{attribute} (attribute, tensor {index})"] = leaf
    return {name: _copy(tensor) for name, tensor in found.items()}


def gradients_of(model: nn.Module) -> State:
    """A copy of every gradient that there is."""
    return {name: _copy(tensor.grad) for name, tensor in _saved(model) if tensor.grad is not None}


def outputs_of(output: Any) -> list[torch.Tensor]:
    return [_copy(leaf) for leaf in _tensors_in(output)]


def _saved(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, t) for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if value is None or isinstance(value, bool | int | float | str | nn.Module):
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
