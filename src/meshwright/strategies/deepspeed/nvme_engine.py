"""`offload=nvme:DIR`: stage 3 whose masters and optimizer lie in files of DeepSpeed's between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.facts.named_parameters import NamedParameters
from meshwright.strategies.deepspeed.engine import ZeroEngine
from meshwright.strategies.engine import HeldTensor, OptimizerState


class NvmeEngine(ZeroEngine):
    """It trains and can be looked at; no checkpoint is made of it, for nothing of it lies still in memory."""

    def _find(
        self,
        optimizer: Optimizer,
        made: list[tuple[dict[str, Any], list[nn.Parameter]]],
        masters: dict[str, torch.Tensor],
        names: dict[int, str],
        shapes: dict[str, torch.Size],
    ) -> None:
        self._pieces, self._kept = {}, {}
        for parameter in self.model.parameters():
            name = names[id(parameter)]
            if name in masters and parameter.requires_grad and name not in self._setting.unused:
                self._zero.set_local_hp_param(self._own_part(parameter, masters[name]), parameter)

    def _own_part(self, parameter: Any, whole: torch.Tensor) -> torch.Tensor:
        """A rank's part of a parameter as DeepSpeed divides it, with padding."""
        room = parameter.ds_tensor.ds_numel
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        flat = torch.nn.functional.pad(whole.reshape(-1), (0, room * self._ranks - whole.numel()))
        return flat.narrow(0, rank * room, room)

    @property
    def _ranks(self) -> int:
        return self._setting.strategy.data_ranks

    def optimized(self) -> NamedParameters:
        return self._own

    def remembered(self) -> OptimizerState:
        return self._optimizer

    def held(self) -> Iterator[HeldTensor]:
        raise CheckpointError(
            "offload=nvme keeps masters and optimizer in files of DeepSpeed's, of which no checkpoint is made; train "
            "without --out, or with offload=params."
        )

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed import zero  # imported already

        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not hasattr(tensor, "ds_tensor"):
                yield name, tensor.detach()
            elif (master := self._zero.get_full_hp_param(tensor) if tensor.requires_grad else None) is not None:
                yield name, master.view(tensor.ds_shape)
            else:
                with zero.GatheredParameters([tensor]):
                    yield name, tensor.detach().clone()
