"""BatchNorm over a batch that is split between ranks: the statistics must be those of the whole batch.

A BatchNorm keeps its class and its `forward`, because a subclass may do more than normalise. Only the call of
`batch_norm` inside that `forward` is replaced. Elsewhere the function has other uses: weight standardisation calls it
on weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import JobError
from meshwright.recording.wrap_forward import Around, wrap_forward
from meshwright.strategies.collectives import all_gather
from meshwright.torch_private.collectives import sum_over
from meshwright.torch_private.modules import (
    AnyBatchNorm,
    BatchNorm,
    SyncBatchNormFunction,
    given_to_batch_norm,
    is_plain_batch_norm,
)


@dataclass(frozen=True)
class NormCall:
    """The arguments of a call of `batch_norm` in training."""

    input: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    momentum: float
    eps: float


Normalise = Callable[[NormCall, dist.ProcessGroup], torch.Tensor]


def take_over_synchronised(model: nn.Module) -> None:
    """Turn `nn.SyncBatchNorm` into plain BatchNorm: it would sync with ranks of other axes, and not at all on CPUs."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = AnyBatchNorm  # type: ignore[assignment]


def synchronise_batch_norms(model: nn.Module, group: dist.ProcessGroup, normalise: Normalise) -> None:
    """Make every BatchNorm normalise over the micro-batches of all ranks of `group`, by one of the functions below."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            module._meshwright_name = name  # for the error message
            wrap_forward(module, _over(group, normalise))


@lru_cache(maxsize=8)
def _over(group: dist.ProcessGroup, normalise: Normalise) -> Around:
    def around(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if module.training and is_plain_batch_norm(forward):  # the compiler cannot follow a mode
            return normalise(NormCall(**given_to_batch_norm(module, *args, **kwargs)), group)
        with _Redirected(normalise, group) as redirected:
            output = forward(*args, **kwargs)
        if module.training and not redirected.calls:
            raise JobError(
                f"{module._meshwright_name} is a BatchNorm whose forward does not call F.batch_norm, so its statistics "
                "cannot be computed over ranks or micro-batches; call F.batch_norm in it, or train with single."
            )
        return output

    return around


class _Redirected(TorchFunctionMode):
    """While active, `batch_norm` in training uses the statistics of all ranks."""

    def __init__(self, normalise: Normalise, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._normalise, self._group = normalise, group
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm and func is not torch.batch_norm:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        given = _arguments(func, args, kwargs or {})
        if not given["training"]:
            return func(*args, **(kwargs or {}))
        given.pop("training"), given.pop("cudnn_enabled", None)
        return self._normalise(NormCall(**given), self._group)


_ORDER = ["input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"]
"""The arguments of `torch.batch_norm`, which has no signature that Python can read."""
_SIGNATURE = inspect.signature(F.batch_norm)


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    if func is torch.batch_norm:
        return {**dict(zip(_ORDER, args, strict=False)), **kwargs}
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def normalise_on_cuda(call: NormCall, group: dist.ProcessGroup) -> torch.Tensor:
    """`F.batch_norm` with the statistics of all ranks' inputs, by the kernels of `nn.SyncBatchNorm`.

    A compiler would stop at those; it fuses plain operators with what is around them.
    """
    if torch.compiler.is_compiling():
        return normalise_plainly(call, group)
    mean, variance, ranks = call.running_mean, call.running_var, dist.get_world_size(group)
    output: torch.Tensor = SyncBatchNormFunction.apply(
        call.input, call.weight, call.bias, mean, variance, call.eps, call.momentum, group, ranks
    )
    return output


def normalise_alone(call: NormCall, group: dist.ProcessGroup) -> torch.Tensor:
    """What `normalise_on_cuda` holds and sends, where no other rank exists: with the statistics of this rank's input.

    The kernels of `nn.SyncBatchNorm` fail on the fake process group, because they read what they gather.
    """
    if torch.compiler.is_compiling():
        return normalise_plainly(call, group)
    sent = _StatisticsSent.apply(call.input, group)
    mean, variance, by_cudnn = call.running_mean, call.running_var, torch.backends.cudnn.enabled
    return torch.batch_norm(sent, call.weight, call.bias, mean, variance, True, call.momentum, call.eps, by_cudnn)


def normalise_plainly(call: NormCall, group: dist.ProcessGroup) -> torch.Tensor:
    """The same as `normalise_on_cuda` by plain operators, for CPUs and for compilers.

    The mean comes first, then the ranks' variances and the squares of their means around it, so that large numbers
    never cancel. What a compiled backward needs follows from the input.
    """
    wide = torch.promote_types(call.input.dtype, torch.float32)
    x = call.input.to(wide)
    dims = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    own_count, (own_variance, own_mean) = x.numel() / x.shape[1], torch.var_mean(x, dims, correction=0)
    totals = _Sum.apply(torch.cat([own_count * own_mean, x.new_full((1,), own_count)]), group.group_name)
    count = totals[-1].detach()
    mean = totals[:-1] / count
    variance = _Sum.apply(own_count * (own_variance + (own_mean - mean).square()), group.group_name) / count
    _track(call.running_mean, mean, call.momentum)
    _track(call.running_var, variance * count / (count - 1), call.momentum)
    # Not `x`: the compiler would keep the wide copy, because messages lie between its uses.
    y = (call.input - mean.view(shape)) * torch.rsqrt(variance + call.eps).view(shape)
    if call.weight is not None:
        y = y * call.weight.to(wide).view(shape)
    if call.bias is not None:
        y = y + call.bias.to(wide).view(shape)
    normalised: torch.Tensor = y.to(call.input.dtype)
    return normalised


class _Sum(torch.autograd.Function):
    """Sum over ranks. Every rank's output depends on every rank's input, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return sum_over(value, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_over(gradients[0], ctx.group), None


class _StatisticsSent(torch.autograd.Function):
    """Returns its input. Ranks gather their means, deviations and counts, and sum two gradients of them in backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.channels = group, input.shape[1]
        own = input.new_zeros(2 * ctx.channels + 1, dtype=torch.float32)
        all_gather(own.new_empty(own.numel() * group.size()), own, group=group)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(gradients[0].new_zeros(2 * ctx.channels, dtype=torch.float32), group=ctx.group)
        return gradients[0], None


@torch.no_grad()
def _track(running: torch.Tensor | None, value: torch.Tensor, share: float) -> None:
    if running is not None:
        running.lerp_(value.detach().to(running.dtype), share)
