"""BatchNorm over a batch that is split between ranks: statistics must be those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.strategies.forward import wrap_forward


def synchronise_batch_norms(model: nn.Module, group: dist.ProcessGroup, *, in_plain_operators: bool) -> nn.Module:
    """Make every BatchNorm see the whole micro-batch of all ranks of `group`.

    PyTorch's SyncBatchNorm where it can be used. It refuses CPU tensors and stumbles over the fake process group, so
    there the same is computed in plain operators.
    """
    if not in_plain_operators:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        return converted
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            wrap_forward(module, _normalise_over(group))
    return model


def _normalise_over(group: dist.ProcessGroup) -> Callable[..., Any]:
    def normalise(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        uses_batch = module.training or module.running_mean is None
        return _synchronised(module, args[0], group) if uses_batch else forward(*args, **kwargs)

    return normalise


def _synchronised(module: Any, batch: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Mean first, then squares around it: two small sums over ranks, and no cancellation between large numbers."""
    x = batch.float()
    dims = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    totals = torch.cat([x.sum(dims), x.new_tensor([x.numel() / x.shape[1]])])
    totals = _Sum.apply(totals, group)
    count = totals[-1].detach()
    mean = totals[:-1] / count
    centred = x - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(dims), group) / count
    if module.training and module.track_running_stats:
        _track(module, mean.detach(), variance.detach() * count / (count - 1))
    y = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.affine:
        y = y * module.weight.float().view(shape) + module.bias.float().view(shape)
    return y.to(batch.dtype)


class _Sum(torch.autograd.Function):
    """The sum over ranks; every rank's output depends on every rank's input, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@torch.no_grad()
def _track(module: Any, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
    module.num_batches_tracked += 1
    share = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean, share)
    module.running_var.lerp_(unbiased_variance, share)
