"""Keep a model's second references to its parameters and buffers true.

A module may keep a parameter, or a view of one, in a plain attribute as well, as `nn.LSTM` does in `_flat_weights`.
Strategies put other tensors in a parameter's place: shards, casts, parts, stand-ins. So before its `forward` such a
module reads each parameter anew through the module that owns it. What the model has put there itself stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import Refused
from meshwright.recording.dtensor import is_dtensor
from meshwright.recording.loose_tensors import ALIASES, Step, TensorPlace, put, take
from meshwright.recording.wrap_forward import wrap_forward


@dataclass(frozen=True)
class View:
    """Which elements of a tensor a view of it shows."""

    whole: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the first element of the tensor."""
    differentiable: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if self.differentiable else tensor.detach()
        return base.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass
class Alias:
    """One place where a parameter or buffer, or a view of it, stands again."""

    name: str
    """The place's, for messages."""
    holder: nn.Module
    path: tuple[Step, ...]
    owner: nn.Module
    attribute: str
    view: View | None
    last: torch.Tensor
    """What was put there last; if something else is found, the model has put it there."""

    def refresh(self) -> None:
        if take(self.holder, self.path) is self.last:
            self.set(getattr(self.owner, self.attribute))

    def restore(self) -> None:
        """Let go of what was computed for a pass."""
        registered = self.owner._parameters.get(self.attribute)
        if registered is not None and self.view is None and take(self.holder, self.path) is self.last:
            self.set(registered)

    def set(self, tensor: torch.Tensor) -> None:
        new = tensor if self.view is None else self._view_of(tensor, self.view)
        if new is not self.last:
            put(self.holder, self.path, new)
            self.last = new

    def _view_of(self, tensor: torch.Tensor, view: View) -> torch.Tensor:
        if is_dtensor(tensor) or tuple(tensor.shape) != view.whole:
            raise Refused(
                f"The model keeps {self.name}, a view of its {self.attribute}, of which a rank holds a part under this "
                "strategy; make the view in forward, or use a strategy that keeps parameters whole (ddp, zero1)."
            )
        return view.of(tensor)


def keep_aliases(model: nn.Module, found: list[tuple[TensorPlace, str, View | None]]) -> None:
    """From now on these places follow the parameters and buffers of these names."""
    if not found:
        return
    kept: dict[int, list[Alias]] = {}
    for place, name, view in found:
        holder, (owner, _, attribute) = model.get_submodule(place.module), name.rpartition(".")
        alias = Alias(
            str(place), holder, place.path, model.get_submodule(owner), attribute, view, take(holder, place.path)
        )
        kept.setdefault(id(holder), []).append(alias)
    for own in kept.values():
        if (holder := own[0].holder) is not model:
            vars(holder)[ALIASES] = own
            wrap_forward(holder, _refreshed)
    # What is never called itself, a list of modules say, is refreshed with the model.
    vars(model)[ALIASES] = [alias for own in kept.values() for alias in own]
    wrap_forward(model, _refreshed_and_restored)


def refresh_aliases(model: nn.Module) -> None:
    """Once parameters and buffers are what they will be."""
    for alias in vars(model).get(ALIASES, ()):
        alias.refresh()


def _refreshed(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for alias in vars(module)[ALIASES]:
        alias.refresh()
    return forward(*args, **kwargs)


def _refreshed_and_restored(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return _refreshed(module, forward, args, kwargs)
    finally:
        for alias in vars(module)[ALIASES]:
            alias.restore()
