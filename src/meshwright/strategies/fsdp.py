"""`fsdp` (= `zero3`), `fsdp:grad-op` and `fsdp:no-shard`: PyTorch's FSDP2, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.facts.model import ModelFacts
from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout, Place
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


class Fsdp(DataStrategy):
    summary = "FSDP2: parameters, gradients and optimizer divided over ranks, gathered block by block"
    lowers = True

    def refuse(self, strategy: Strategy, facts: ModelFacts, place: Place) -> str | None:
        scalars = [p.name for p in facts.parameters if not p.shape]
        if scalars:
            return (
                f"FSDP2 cannot shard a parameter without dims: {', '.join(scalars)}; "
                "give it the shape (1,), or use ddp, zero1 or zero2."
            )
        return None

    def axes(self, strategy: Strategy) -> dict[str, int]:
        if strategy.variant == "no-shard":
            return {"replicate": strategy.data_ranks, "shard": 1}
        return {"data": strategy.data_ranks}

    def layout(self, strategy: Strategy) -> Layout:
        ranks = 1 if strategy.variant == "no-shard" else strategy.data_ranks
        return Layout(parameters=ranks, gradients=ranks, optimizer=ranks)

    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        return shard(model, setting, reshard=setting.strategy.variant == "")


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
