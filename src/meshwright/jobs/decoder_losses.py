"""Cross entropy as other trainers compute it, for comparisons with their runs: it changes the memory of a step.

PyTorch's own, on logits cast to fp32, is in `decoder.py`. Megatron and nanotron shift and exponentiate one copy, which
also works on a sharded vocabulary. llm-foundry trains MPT with a fused one, which writes the gradient over the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.facts.job import Job
from meshwright.jobs.decoder import Batch, Decoder, Shape, decoder_job


def shifted_loss_job(shape: Shape, *, global_batch: int) -> Job:
    """A decoder with the cross entropy of tensor-parallel trainers."""
    return replace(decoder_job(shape, global_batch=global_batch), loss=_shifted_loss)


def fused_loss_job(shape: Shape, *, global_batch: int) -> Job:
    """A decoder with a fused cross entropy, which does not cast the logits."""
    job = decoder_job(shape, global_batch=global_batch)
    return replace(job, model=lambda: _FusedDecoder(shape), inputs=lambda batch: (batch["x"], batch["y"]), loss=_total)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        picked = shifted.gather(-1, labels[:, None])
        exponents = shifted.exp_()
        total = exponents.sum(-1, keepdim=True)
        ctx.save_for_backward(exponents.div_(total), labels)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shares, labels = ctx.saved_tensors
        shares.scatter_add_(-1, labels[:, None], torch.full_like(gradients[0], -1.0))
        return shares.mul_(gradients[0]), None


_PARTS = 64
"""Parts of a batch whose exponentials are added up one after another."""


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        # The operator instead of the torch function: autocast must not cast the arguments of a fused kernel. In parts,
        # because the operator writes all exponentials, and a fused kernel none.
        parts = logits.split(max(1, len(logits) // _PARTS))
        total = torch.cat([torch.ops.aten.logsumexp(part, [-1], True) for part in parts])
        ctx.save_for_backward(logits, labels, total)
        return (total - logits.gather(-1, labels[:, None])).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, labels, total = ctx.saved_tensors
        shares = logits.detach().sub_(total).exp_()
        shares.scatter_add_(-1, labels[:, None], torch.full_like(total, -1.0))
        return shares.mul_(gradients[0].to(shares.dtype)), None


class _FusedDecoder(Decoder):
    """A decoder from token ids and labels to the loss of each token."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = _Fused.apply(super().forward(tokens).flatten(0, 1), labels.flatten())
        return found


def _shifted_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    losses: Tensor = _Shifted.apply(logits.flatten(0, 1), batch["y"].flatten())
    return losses.sum(), batch["y"].numel()


def _total(losses: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return losses.sum(), batch["y"].numel()
