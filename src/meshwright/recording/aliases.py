"""Keep a model's second references to its parameters and buffers up to date.

A module may also keep a parameter, or a view of one, in a plain attribute, as `nn.LSTM` does in `_flat_weights`.
Strategies replace parameters by shards, casts or stand-ins. So such a module re-reads each parameter from its owner
before every `forward`. If the model has assigned another tensor to the attribute, that tensor is kept.
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
    """Which elements of a tensor a view covers."""

    whole: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from the first element of the tensor."""
    differentiable: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if self.differentiable else tensor.detach()
        return base.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass
class Alias:
    """A second reference to a parameter or buffer, or to a view of one."""

    name: str
    """How messages name the reference."""
    holder: nn.Module
    path: tuple[Step, ...]
    owner: nn.Module
    attribute: str
    view: View | None
    last: torch.Tensor
    """The tensor that was last put there. If another one is found, the model has assigned it."""

    def refresh(self) -> None:
        if take(self.holder, self.path) is self.last:
            self.set(getattr(self.owner, self.attribute))

    def restore(self) -> None:
        """Point at the registered parameter again, and so release what was computed for one pass."""
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
                f"The model keeps {self.name}, a view of its {self.attribute}, but under this strategy a rank holds "
                "a part of that; make the view in forward, or use a strategy that keeps parameters whole (ddp, zero1)."
            )
        return view.of(tensor)


def keep_aliases(model: nn.Module, found: list[tuple[TensorPlace, str, View | None]]) -> None:
    """Make these places follow the parameters and buffers with these names from now on."""
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
    # A module that is never called, such as a ModuleList, is refreshed with the model.
    vars(model)[ALIASES] = [alias for own in kept.values() for alias in own]
    wrap_forward(model, _refreshed_and_restored)


def refresh_aliases(model: nn.Module) -> None:
    """Point all aliases at the current parameters and buffers."""
    for alias in vars(model).get(ALIASES, ()):
        alias.refresh()


def _refreshed(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    refresh_aliases(module)
    return forward(*args, **kwargs)


def _refreshed_and_restored(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return _refreshed(module, forward, args, kwargs)
    finally:
        for alias in vars(module)[ALIASES]:
            alias.restore()
