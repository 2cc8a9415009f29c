"""The CTC loss as a GPU computes it, for tensors without values: PyTorch's own reads the lengths out of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.torch_private.autograd import direct_apply

NONE, MEAN = 0, 1
"""PyTorch's numbers for reductions."""


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` without values. Targets are taken to be as long as their rows are wide."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    losses: Tensor = _ctc(batched, _longest(targets, target_lengths, batched.shape[1]))
    losses = losses if log_probs.dim() == 3 else losses.squeeze(0)
    if reduction == NONE:
        return losses
    return losses.mean() if reduction == MEAN else losses.sum()


def _longest(targets: Tensor, lengths: Tensor | Sequence[int], samples: int) -> int:
    """The longest target; the mean one if all targets are in one row and only values tell where each ends."""
    if targets.dim() == 2:
        return targets.shape[1]
    return targets.numel() // samples if isinstance(lengths, Tensor) else max(lengths)


class _Ctc(torch.autograd.Function):
    """Keeps the probabilities and, for every frame, those of all positions in the target with blanks in between."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, longest: int) -> Tensor:
        frames, samples, _ = log_probs.shape
        forward = log_probs.new_empty(samples, frames, 2 * longest + 1)
        ctx.save_for_backward(log_probs, forward)
        return forward[:, 0, 0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_probs, forward = ctx.saved_tensors
        backward = torch.empty_like(forward)  # alive beside the result, as in PyTorch's kernel
        found = torch.full_like(log_probs, float("-inf"))
        del backward
        return found, None


_ctc = direct_apply(_Ctc)
