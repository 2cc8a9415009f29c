"""`layers=N` in one process: consecutive calls of the model run on consecutive devices, GPUs and perhaps the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import Refused
from meshwright.facts.model import ModelFacts
from meshwright.recording.wrap_forward import Around, wrap_call
from meshwright.strategies.intercepted import changed_by
from meshwright.strategies.pipeline.stages import Stages
from meshwright.torch_private.tensors import version_of
from meshwright.torch_private.trees import tree_leaves, tree_map

Devices = Sequence[torch.device]


def devices_for(layers: int, first: torch.device) -> list[torch.device]:
    """The GPUs of this machine, and the CPU as the last device if one GPU is missing."""
    if first.type != "cuda":
        raise Refused(
            f"layers={layers} in one process needs several devices, and a CPU is one; use --ranks {layers}, which "
            "gives each part of the layers a separate process."
        )
    gpus = [torch.device("cuda", index) for index in range(min(layers, torch.cuda.device_count()))]
    if len(gpus) < layers - 1:
        raise Refused(
            f"layers={layers} in one process needs {layers} devices, but there are {len(gpus)} GPUs and the CPU; "
            f"use layers={len(gpus) + 1} or less."
        )
    return gpus if len(gpus) == layers else [*gpus, torch.device("cpu")]


def place_parameters(model: nn.Module, facts: ModelFacts, stages: Stages, devices: Devices) -> dict[str, torch.device]:
    """The device of every parameter and buffer: that of the first stage that calls its module, else the first one."""
    units = {
        facts.calls[call].name: devices[stage]
        for stage in reversed(range(len(stages)))
        for call in reversed(stages.calls_of(stage))
    }
    places = {}
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), None)
        places[name] = units[unit] if unit else devices[0]
    return places


def compute_in_place(model: nn.Module, facts: ModelFacts, stages: Stages, devices: Devices) -> None:
    """Move each unit's inputs to its device before it runs."""
    seen: set[str] = set()
    for stage in range(len(stages)):
        for call in stages.calls_of(stage):
            name = facts.calls[call].name
            if name not in seen:
                wrap_call(model.get_submodule(name), _on(devices[stage]))
                seen.add(name)


def _on(device: torch.device) -> Around:
    def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = args, kwargs
        args, kwargs = _move(given, device)
        versions = [_version(leaf) for leaf in tree_leaves((args, kwargs))]
        foreign = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.device != device
        ]
        # A tied parameter is on the device of its first use.
        for owner, name, parameter in foreign:
            owner._parameters[name] = parameter.to(device)  # type: ignore[assignment]  # for this call
        try:
            output = forward(*args, **kwargs)
        finally:
            for owner, name, parameter in foreign:
                owner._parameters[name] = parameter
        _copy_back(tree_leaves(given), tree_leaves((args, kwargs)), versions)
        return output

    return call


def _copy_back(given: list[Any], moved: list[Any], versions: list[int]) -> None:
    """Copy moved inputs that the unit changed in place back to the originals."""
    for leaf, copy, version in zip(given, moved, versions, strict=True):
        if copy is not leaf and _version(copy) != version:
            leaf.copy_(copy)


def _version(leaf: Any) -> int:
    return version_of(leaf) if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0


class FollowDevices(TorchFunctionMode):
    """Mode that runs a function of tensors on several devices on the latest stage's device.

    A function that changes a tensor in place runs on that tensor's device.
    """

    off_in_compiled = True  # a compiled unit's inputs are on its device

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._order = {device: place for place, device in enumerate(devices)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(places) > 1 and places <= set(self._order) and func not in _MOVING:
            target = changed_by(func, args, kwargs)
            place = max(places, key=self._order.__getitem__) if target is None else target.device
            args, kwargs = _move((args, kwargs), place)
        return func(*args, **kwargs)


_MOVING = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as}


def _move(tree: Any, device: torch.device) -> Any:
    return tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf, tree
    )
