"""The two halves of PyTorch's `clip_grad_norm_`: the norm, and the scaling (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import clip_grad

TotalNorm = Callable[..., Tensor]
Scaling = Callable[..., None]


def wrap_clipping(norm: Callable[[TotalNorm], TotalNorm], scaling: Callable[[Scaling], Scaling]) -> None:
    """Make `clip_grad_norm_` and its public halves run `norm(its norm)` and `scaling(its scaling)` from now on.

    `clip_grad_norm_` looks both up when it runs, so names that were imported earlier are served, too.
    """
    clip_grad._get_total_norm = nn.utils.get_total_norm = norm(clip_grad._get_total_norm)
    clip_grad._clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_ = scaling(clip_grad._clip_grads_with_norm_)
