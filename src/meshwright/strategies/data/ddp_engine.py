"""Engines that keep a whole copy of the model on every rank and sum the gradients."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.describe.structure import map_tensors
from meshwright.errors import JobError
from meshwright.facts.job import NamedParameters
from meshwright.strategies.data.summing import by_mesh, refuse_gradients, sum_gradients
from meshwright.strategies.engine import ApplyContext, Engine

# Buffers are the same on all ranks (BatchNorm is synchronised), so there is no need to send them before every forward.
# torch 2.13 renamed the option.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


class DdpEngine(Engine):
    def __init__(self, model: nn.Module, module: DistributedDataParallel, ranks: int, *, uses_all: bool) -> None:
        """`uses_all`: every step uses every parameter, so DDP waits for all gradients."""
        super().__init__(model, module)
        self._ddp, self._uses_all = module, uses_all
        self.gradient_scale = float(ranks)

    def finish(self) -> None:
        if not self._uses_all:
            return
        if missing := [name for name, parameter in self.parameters().named() if parameter.grad is None]:
            raise JobError(
                f"{missing[0]} got no gradient in this step, but the test step before training used every parameter, "
                "so ddp waits for it; use zero1 or zero2, which do not."
            )

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()


class SummedAfterwardsEngine(Engine):
    """Sums gradients over ranks once, after all backward passes.

    DDP needs one backward pass to communicate in, which a pipeline does not have. Zero-bubble schedules set gradients
    without calling the hooks that DDP uses, and a CUDA graph is replayed without them. DDP also has one group for all
    parameters, and not another for those that are `apart`.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        unused: frozenset[str],
        dtype: torch.dtype | None = None,
        apart: Mapping[str, DeviceMesh] | None = None,
    ) -> None:
        """`dtype`: to which gradients are rounded for the sum."""
        super().__init__(model)
        self._mesh, self._unused, self._dtype, self._apart = mesh, unused, dtype, apart or {}

    def finish(self) -> None:
        named = list(self.parameters().named())
        refuse_gradients(name for name, p in named if name in self._unused and p.grad is not None)
        used = NamedParameters((name, p) for name, p in named if name not in self._unused)
        for mesh, parameters in by_mesh(used, self._mesh, self._apart):
            sum_gradients(parameters, mesh.get_group(), dtype=self._dtype)


class AveragingEngine(Engine):
    """Averages gradients over ranks at the end of each backward pass of a user's loop.

    DDP must see every forward call, and every parameter that a call used must get its gradient in the next backward
    pass. A user's loop may call other methods of the model, or differentiate two losses of one call. The mean of what
    is already a mean stays as it is, so gradients may accumulate over several passes.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
        """`dtype`: to which gradients are rounded for the sum."""
        super().__init__(model)
        self._group, self._share, self._dtype = mesh.get_group(), 1.0 / mesh.size(), dtype
        self._trained = self.leaves()

    def reduces(self, asked: bool) -> bool:
        return asked

    def end_backward(self, *, reduced: bool, factor: float) -> None:
        if reduced:
            trained = [parameter for parameter in self._trained if parameter.requires_grad]
            sum_gradients(trained, self._group, share=self._share, dtype=self._dtype)


def replicate(model: nn.Module, context: ApplyContext) -> Engine:
    """Put a whole copy of the model on every rank."""
    context.fill()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return Engine(model)
    assert context.mesh is not None
    if context.pipelined or context.strategy.graphs or context.apart:
        return SummedAfterwardsEngine(model, context.mesh, context.unused, context.reduce_dtype, context.apart)
    if context.own_loop:
        return AveragingEngine(model, context.mesh, context.reduce_dtype)
    group = context.mesh.get_group()
    uses_all = not (context.unused or context.facts.unseen or context.facts.by_value)
    if not uses_all:
        model.register_forward_hook(_with_views_of_parameters)
    module = DistributedDataParallel(
        model,
        device_ids=[context.device] if context.device.type == "cuda" else None,
        process_group=group,
        init_sync=False,  # every rank replayed the same tape
        gradient_as_bucket_view=True,
        find_unused_parameters=not uses_all,
        **_NO_BUFFER_SYNC,
    )
    # Lambdas, because DDP refuses hooks whose annotations are text.
    if context.fake:
        module.register_comm_hook(group, lambda own, bucket: _average_in_fake_world(own, bucket, context.reduce_dtype))
    elif context.reduce_dtype is torch.bfloat16:
        module.register_comm_hook(group, lambda own, bucket: _average_in_bf16(own, bucket))
    _fix_buckets(module)
    return DdpEngine(model, module, context.strategy.reduced_ranks, uses_all=uses_all)


def _with_views_of_parameters(model: nn.Module, args: Any, output: Any) -> Any:
    """Return views of parameters that are outputs: DDP finds used parameters through the outputs' graph."""
    return map_tensors(lambda tensor: tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor, output)


class _EveryParameter(nn.Module):
    """A dummy model whose backward pass reaches every parameter, the last one first."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._listed = parameters

    def forward(self, zero: torch.Tensor) -> torch.Tensor:
        for parameter in self._listed:
            zero = zero + parameter.reshape(-1)[:1].to(zero) * 0
        return zero


def _fix_buckets(module: DistributedDataParallel) -> None:
    """Make DDP arrange its buckets before the first step instead of after it.

    DDP rearranges them by the order of gradients in the first backward pass, and rounding depends on an element's
    position in its bucket. So the first step of a resumed run would round differently than in an uninterrupted run.
    """
    model = module.module
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    module.module = _EveryParameter(parameters)
    try:
        module(torch.zeros(1, device=parameters[0].device)).sum().backward()
    finally:
        module.module = model
    for parameter in parameters:
        parameter.grad = None


def _average_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, except for complex gradients, which it would cut to their real parts."""
    hook = bf16_compress_hook if bucket.buffer().is_floating_point() else allreduce_hook
    return hook(group, bucket)


def _average_in_fake_world(
    group: dist.ProcessGroup, bucket: dist.GradBucket, dtype: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """Replaces DDP's own reduction, which waits for a result that the fake process group never gives."""
    buffer = bucket.buffer()
    sent = buffer if dtype is None else buffer.to(dtype)
    dist.all_reduce(sent, group=group)
    sent.div_(group.size())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer if sent is buffer else buffer.copy_(sent))
    return done
