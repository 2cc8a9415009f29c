"""The norm that PyTorch's `clip_grad_norm_` computes (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import clip_grad

TotalNorm = Callable[..., Tensor]


def wrap_total_norm(wrap: Callable[[TotalNorm], TotalNorm]) -> None:
    """Make `clip_grad_norm_` and `get_total_norm` compute the norm by `wrap(norm)` from now on.

    `clip_grad_norm_` looks the function up when it runs, so names that were imported earlier are served, too.
    """
    clip_grad._get_total_norm = nn.utils.get_total_norm = wrap(clip_grad._get_total_norm)
