"""Stand-ins for a model's tensors during a pass: the same layout, with made-up values or none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from meshwright.recording.blueprint import Blueprint, set_attributes
from meshwright.recording.operation import Slot
from meshwright.recording.report_as_cpu import is_meta
from meshwright.torch_private.fake_tensors import FakeTensor
from meshwright.torch_private.modules import lend_tensors


def stand_in(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A stand-in of the kind that is active: meta, fake or real. `dtype` applies to floating tensors only."""
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if not is_meta(tensor):
        return tensor.detach().to(dtype, copy=True)
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    if has_no_values(empty):
        return empty
    return empty.normal_(std=0.02) if empty.is_floating_point() else empty.zero_()


def has_no_values(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or is_meta(tensor)


def _parameter(name: str, parameter: nn.Parameter) -> torch.Tensor:
    """An nn.Parameter, because a model may look for parameters among its attributes."""
    return nn.Parameter(stand_in(parameter), requires_grad=parameter.requires_grad)


def stand_ins(
    blueprint: Blueprint, parameter: Callable[[str, nn.Parameter], torch.Tensor] = _parameter
) -> dict[str, torch.Tensor]:
    """Stand-ins for all parameters and buffers by name. Those of plain attributes are set at once."""
    fill_attributes(blueprint)
    model = blueprint.model
    tensors = {name: parameter(name, p) for name, p in model.named_parameters()}
    return tensors | {name: stand_in(b) for name, b in model.named_buffers()}


def fill_attributes(blueprint: Blueprint) -> None:
    """Set stand-ins for tensors that are neither parameters nor buffers."""

    def make(slot: Slot) -> torch.Tensor:
        return stand_in(torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device="meta"))

    set_attributes(blueprint.model, blueprint.attributes, make)


def lend(model: nn.Module, tensors: dict[str, torch.Tensor]) -> AbstractContextManager[Any]:
    """Context in which a model uses other tensors. Unlike `functional_call`, it also covers recomputing in backward."""
    return lend_tensors(model, tensors, tie_weights=True)
