"""An exponential moving average of the weights that this rank's optimizer updates.

An average of elements is the same on a shard as on the whole tensor, so every rank averages what it updates, under the
parameter's name. Buffers and frozen parameters are not averaged. The numbers are those of PyTorch's `AveragedModel`
with `get_ema_multi_avg_fn`: the first update copies the weights.
"""

from __future__ import annotations

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from meshwright.facts.job import NamedParameters
from meshwright.strategies.norm import local


class Ema:
    """The averages of parameters, in fp32 or more, where the optimizer's masters are."""

    def __init__(self, decay: float, parameters: NamedParameters) -> None:
        self.decay = decay
        self.updates = 0
        self._parameters = parameters
        self._averages: list[torch.Tensor] = []
        self._average = get_ema_multi_avg_fn(decay)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The averages by name: DTensors where the parameters are; empty before the first update."""
        names = [name for name, _ in self._parameters.named()]
        return list(zip(names, self._averages, strict=True)) if self.updates else []

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after an optimizer step."""
        if not self.updates:
            self._averages = [_wide(parameter.detach()).clone() for parameter in self._parameters]
        elif self._averages:
            averages = [local(average) for average in self._averages]
            current = [_wide(local(parameter.detach())) for parameter in self._parameters]
            self._average(averages, current, self.updates)
        self.updates += 1

    def make_room(self) -> list[tuple[str, torch.Tensor]]:
        """Memory for averages that are loaded, by name."""
        self._averages = [torch.zeros_like(_wide(parameter.detach())) for parameter in self._parameters]
        self.updates = 1  # the loader sets the true number
        return self.named()

    def forget(self) -> None:
        """Begin anew with the next update."""
        self.updates, self._averages = 0, []

    @torch.no_grad()
    def exchange(self, kept: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Put the averages in the place of the weights; with what this returned, put the weights back."""
        if kept is None:
            kept = [local(parameter.detach()).clone() for parameter in self._parameters]
            source = [local(average) for average in self._averages] or kept
        else:
            source = kept
        for parameter, values in zip(self._parameters, source, strict=True):
            local(parameter.data).copy_(values)
        return kept


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In fp32 at least: a small share of the new weights would be lost in bf16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
