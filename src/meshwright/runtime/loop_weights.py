"""The weights of a model in a user's loop: those that the optimizer updates, and those that the model computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from meshwright.assemble.optimizer import HostCopies
from meshwright.recording.dtensor import is_dtensor
from meshwright.strategies.cuts import Cut
from meshwright.strategies.engine import Engine
from meshwright.strategies.norm import local


class LoopWeights:
    """Keeps what the model computes with equal to what the optimizer, or the loop by hand, has made of the weights."""

    def __init__(
        self,
        engine: Engine,
        host: HostCopies | None,
        seen: Iterable[nn.Parameter],
        on_any_data_rank: Callable[[bool], bool],
    ) -> None:
        """`seen` are the parameters that the loop sees. `on_any_data_rank` tells whether something holds on any."""
        self._engine, self._host, self._seen = engine, host, list(seen)
        self._on_any_data_rank = on_any_data_rank
        self.are_copies = host is not None or engine.updates_copies
        """Whether the model computes with other tensors than those that the optimizer updates."""
        self._applied = self._fingerprint()
        """The weights' fingerprint when the model got them."""
        self._compared = self._has_optimizer = False
        """Whether a training call has compared it since the last update, and whether an optimizer makes updates."""

    def give(self) -> None:
        """Give the model the weights that the optimizer has updated. All ranks call it."""
        if self._host is not None:
            self._host.give_all_parameters()
        self._engine.updated()
        self.keep()

    def keep(self) -> None:
        """Note the weights after an optimizer's step."""
        self._applied, self._compared, self._has_optimizer = self._fingerprint(), False, True

    def passed(self) -> None:
        """Called after gradients are reduced. A loop without an optimizer updates the weights by hand then."""
        if not self._has_optimizer:
            self._compared = False

    def follow_changes(self) -> None:
        """Fetch weights that the loop changed by hand since the last step, as for a WGAN. All ranks call it.

        `p.data.clamp_()` does not even count as a change of `p`, so values are compared.
        """
        if self._compared or not self._applied.numel():
            return
        before, self._applied, self._compared = self._applied, self._fingerprint(), True
        if self._on_any_data_rank(not torch.equal(self._applied, before)):
            if self._host is not None:
                self._host.give_all_parameters()
            self._engine.loaded()

    @torch.no_grad()
    def put(self, state: dict[str, torch.Tensor]) -> None:
        """Load whole tensors by the unsplit model's names into what this rank holds. All ranks call it."""
        for held in self._engine.held():
            if held.name in state:
                value = state[held.name].to(device=held.tensor.device, dtype=held.tensor.dtype)
                value = held.cut.take(value) if isinstance(held.cut, Cut) else value
                _copy_part(value, held.tensor)
        self._engine.loaded()
        if self._host is not None:
            self._host.take_parameters()
        self._applied, self._compared = self._fingerprint(), True

    @torch.no_grad()
    def _fingerprint(self) -> torch.Tensor:
        """Numbers that show whether weights were changed; none if the model computes with the optimizer's."""
        if not self.are_copies:
            return torch.empty(0)
        sums = [local(parameter).double().sum().cpu() for parameter in self._seen]
        return torch.stack(sums) if sums else torch.empty(0)


def _copy_part(value: torch.Tensor, target: Any) -> None:
    if not is_dtensor(target):
        target.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = target.device_mesh, target.placements
    on_mesh = value.to(mesh.device_type)
    target.to_local().copy_(distribute_tensor(on_mesh, mesh, placements, src_data_rank=None).to_local())
