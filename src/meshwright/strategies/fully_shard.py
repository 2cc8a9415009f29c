"""FSDP2 on a model's blocks, and how it takes part in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.strategies.engine import Engine, Setting


class FsdpEngine(Engine):
    def __init__(self, model: nn.Module, root: FSDPModule, ranks: int, *, keep_gathered: bool) -> None:
        super().__init__(model)
        self._root, self._keep_gathered = root, keep_gathered
        self.gradient_scale = float(ranks)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        @contextmanager
        def micro_batch() -> Iterator[None]:
            self._root.set_requires_gradient_sync(last)
            self._root.set_is_last_backward(last)
            if self._keep_gathered:
                # Weights do not change between micro-batches, so what stays gathered in forward may stay till the last.
                self._root.set_reshard_after_backward(last)
            yield

        return micro_batch()


def shard(model: nn.Module, setting: Setting, *, reshard: bool) -> FsdpEngine:
    """FSDP2 on every block and on what is left; `reshard` frees a block's parameters between forward and backward.

    Under a pipeline they stay for all micro-batches of a step: what is gathered is gathered once.
    """
    reshard = reshard and not setting.pipelined
    for block in setting.blocks(model):
        _fully_shard(block, setting, reshard=reshard)
    # The root's parameters end the forward pass and begin the backward pass (the head): PyTorch's default keeps them.
    root = _fully_shard(model, setting, reshard=None if reshard else False)
    setting.fill()
    return FsdpEngine(model, root, setting.strategy.data_ranks, keep_gathered=not reshard)


def _fully_shard(module: nn.Module, setting: Setting, *, reshard: bool | None) -> FSDPModule:
    # Inputs and outputs are cast by the precision policy, alike under every strategy.
    lowered = setting.compute_dtype if setting.lowered else None
    precision = MixedPrecisionPolicy(
        param_dtype=lowered, reduce_dtype=torch.float32 if lowered else None, cast_forward_inputs=False
    )
    return fully_shard(
        module,
        mesh=setting.mesh,
        reshard_after_forward=reshard,
        mp_policy=precision,
        offload_policy=_offload(setting),
    )


def _offload(setting: Setting) -> OffloadPolicy:
    if setting.strategy.offload == "params":
        return CPUOffloadPolicy(pin_memory=setting.device.type == "cuda")
    return OffloadPolicy()
