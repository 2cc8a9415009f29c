"""FSDP2 on a model's blocks, and how it takes part in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.facts.named import NamedParameters
from meshwright.strategies.engine import Engine, Held, Setting
from meshwright.strategies.used import UsedParameters
from meshwright.strategies.whole import WholeParameters


class FsdpEngine(Engine):
    def __init__(
        self, model: nn.Module, root: FSDPModule, ranks: int, whole: WholeParameters, used: UsedParameters | None
    ) -> None:
        super().__init__(model)
        self._root, self._whole, self._used = root, whole, used
        self._last = True
        self.keeps_gathered = False
        self.gradient_scale = float(ranks)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        @contextmanager
        def micro_batch() -> Iterator[None]:
            self._last = last
            self._root.set_requires_gradient_sync(last)
            self._root.set_is_last_backward(last)
            if self.keeps_gathered:
                # Weights do not change between micro-batches, so what stays gathered in forward may stay till the last.
                self._root.set_reshard_after_backward(last)
            yield

        return micro_batch()

    def backward(self, loss: torch.Tensor) -> None:
        if self._used is not None:
            loss = self._used.with_those_of_others(loss, last=self._last)
        loss.backward()

    def finish(self) -> None:
        if self._used is not None:
            self._used.forget_unused()
        self._whole.sum_gradients()

    def parameters(self) -> NamedParameters:
        return NamedParameters((n, self._whole.optimized(p)) for n, p in super().parameters().named())

    def held(self) -> Iterator[Held]:
        for held in super().held():
            yield Held(held.name, self._whole.optimized(held.tensor))

    def forget_gradients(self) -> None:
        self._whole.forget_gradients()


def shard(model: nn.Module, setting: Setting, *, reshard: bool, whole: frozenset[str]) -> FsdpEngine:
    """FSDP2 on every block and on what is left; `reshard` frees a block's parameters between forward and backward.

    Under a pipeline they stay for all micro-batches of a step: what is gathered is gathered once. Where samples decide
    which blocks run, the model is gathered as one: a rank cannot gather a block that another one does not call.
    """
    reshard = reshard and not setting.pipelined
    ignored = {p for name, p in model.named_parameters(remove_duplicate=False) if name in whole}
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {names[id(block)]: block for block in setting.blocks(model) if not setting.facts.blocks_by_value}
    for block in blocks.values():
        if any(parameter not in ignored for parameter in block.parameters()):
            _fully_shard(block, setting, ignored, reshard=reshard)
    # The root's parameters end the forward pass and begin the backward pass (the head): PyTorch's default keeps them.
    root = _fully_shard(model, setting, ignored, reshard=None if reshard else False)
    setting.fill()
    assert setting.mesh is not None
    kept = WholeParameters([(n, p) for n, p in model.named_parameters() if n in whole], setting.mesh, setting.device)
    used = UsedParameters(model, setting.mesh, blocks) if setting.facts.by_value else None
    engine = FsdpEngine(model, root, setting.strategy.data_ranks, kept, used)
    engine.keeps_gathered = not reshard
    return engine


def _fully_shard(
    module: nn.Module, setting: Setting, ignored: set[nn.Parameter], *, reshard: bool | None
) -> FSDPModule:
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
        ignored_params=ignored,
    )


def _offload(setting: Setting) -> OffloadPolicy:
    if setting.strategy.offload == "params":
        return CPUOffloadPolicy(pin_memory=setting.device.type == "cuda")
    return OffloadPolicy()
