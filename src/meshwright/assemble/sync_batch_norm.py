"""Call the kernels of `nn.SyncBatchNorm` without the module, which would replace what a subclass of BatchNorm adds."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.torch_private.modules import SyncBatchNormFunction


def normalise_on_cuda(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    *,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """`F.batch_norm` with the statistics of all ranks' inputs."""
    ranks = dist.get_world_size(group)
    output: torch.Tensor = SyncBatchNormFunction.apply(
        input, weight, bias, running_mean, running_var, eps, momentum, group, ranks
    )
    return output
