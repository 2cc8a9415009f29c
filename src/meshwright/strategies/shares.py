"""Whole tensors of whose gradients each rank computes a share that is not summed in backward.

On some axes every rank holds all parameters and computes with a part of the activations, as on the data axis. There the
data strategy sums the parameters' gradients, once and in its own way. Backward is linear, so a function of parameters
alone has a share as its gradient too, and nothing has to be sent for it. Where such a tensor meets one with a whole
gradient, every rank computes the same: `once` lets each of them keep an equal share of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.torch_private.autograd import direct_apply
from meshwright.torch_private.modes import without_torch_function

_SHARES, _SUMMED_LATER = "_meshwright_shares", "_meshwright_summed_later"


def sum_later(mesh: DeviceMesh) -> None:
    """Leave the gradients of parameters as shares on this axis, because the data strategy sums them."""
    mesh.__dict__[_SUMMED_LATER] = True


def mark_shares(x: torch.Tensor) -> torch.Tensor:
    """Mark a function of parameters alone."""
    x.__dict__[_SHARES] = True
    return x


def has_shares(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether a tensor is a function of parameters alone, on an axis that leaves shares."""
    if not mesh.__dict__.get(_SUMMED_LATER):
        return False
    return _SHARES in x.__dict__ or isinstance(x, nn.Parameter)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with without_torch_function():
            return gradient / ctx.ranks, None


once: Any = direct_apply(_Once)
"""(tensor, ranks) -> the tensor for a computation that every rank does; the sum over ranks of its shares is whole."""
