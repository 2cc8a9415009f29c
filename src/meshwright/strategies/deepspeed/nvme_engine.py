"""`offload=nvme:DIR`: stage 3 with masters and optimizer state in DeepSpeed's files between steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.facts.job import NamedParameters
from meshwright.strategies.deepspeed.engine import MadeGroups, ZeroEngine
from meshwright.strategies.engine import HeldTensor, OptimizerState


class NvmeEngine(ZeroEngine):
    """An engine that trains and can be evaluated, but makes no checkpoints."""

    def _find_pieces(self, optimizer: Optimizer, made: MadeGroups, masters: dict[str, torch.Tensor]) -> None:
        self._pieces, self._kept = {}, {}
        for parameter in self.model.parameters():
            name = self._names[id(parameter)]
            if name in masters and parameter.requires_grad and name not in self._context.unused:
                self._zero.set_local_hp_param(self._own_part(parameter, masters[name]), parameter)

    def _own_part(self, parameter: Any, whole: torch.Tensor) -> torch.Tensor:
        """A rank's part of a parameter as DeepSpeed divides it, with padding."""
        room = parameter.ds_tensor.ds_numel
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        padding = room * self._context.strategy.data_ranks - whole.numel()
        return torch.nn.functional.pad(whole.reshape(-1), (0, padding)).narrow(0, rank * room, room)

    def optimized(self) -> NamedParameters:
        return self._own

    def remembered(self) -> OptimizerState:
        return self._optimizer

    def held(self) -> Iterator[HeldTensor]:
        raise CheckpointError(
            "offload=nvme keeps masters and optimizer state in DeepSpeed's files, so no checkpoint can be made; train "
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
