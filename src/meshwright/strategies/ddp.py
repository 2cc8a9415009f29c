"""`ddp`: PyTorch's DistributedDataParallel; every rank has everything and gradients are averaged in buckets."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.facts.strategy import Strategy
from meshwright.strategies.base import DataStrategy, Layout
from meshwright.strategies.engine import Engine, Setting

# Buffers are alike on all ranks (BatchNorm is synchronised), so sending them before every forward is waste.
# The option changed its name in torch 2.13.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


class DdpEngine(Engine):
    def __init__(self, model: nn.Module, module: DistributedDataParallel, ranks: int) -> None:
        super().__init__(model, module)
        self._ddp = module
        self.gradient_scale = float(ranks)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()


class Ddp(DataStrategy):
    summary = "DistributedDataParallel: a whole copy on every rank, gradients averaged"

    def layout(self, strategy: Strategy) -> Layout:
        return Layout()

    def apply(self, model: nn.Module, setting: Setting) -> Engine:
        setting.fill()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return Engine(model)
        module = DistributedDataParallel(
            model,
            device_ids=[setting.device] if setting.device.type == "cuda" else None,
            device_mesh=setting.mesh,
            init_sync=False,  # every rank played the same tape
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(setting.unused or setting.facts.unseen),
            **_NO_BUFFER_SYNC,
        )
        if setting.fake:
            module.register_comm_hook(None, lambda state, bucket: _sum_in_a_fake_world(bucket))
        return DdpEngine(model, module, setting.strategy.data_ranks)


def _sum_in_a_fake_world(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own reduction waits for a result that the fake process group never has."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer.div_(dist.get_world_size()))
    return done
