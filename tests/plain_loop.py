"""The user's own training: builder, plain loop, nothing of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshwright.facts.job import Job, NamedParameters


def train_plainly(job: Job, batches: list[Any], *, seed: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each step and the state dict after the last."""
    torch.manual_seed(seed)
    model = job.model().train()
    optimizer = job.optimizer(NamedParameters((n, p) for n, p in model.named_parameters() if p.requires_grad))
    schedule = job.schedule(optimizer) if job.schedule else None
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        inputs = job.inputs(batch)
        total, weight = job.loss(model(**inputs) if isinstance(inputs, dict) else model(*inputs), batch)
        loss = total / weight
        loss.backward()
        if job.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
        optimizer.step()
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(loss.item())
        elif hasattr(schedule, "step_update"):
            schedule.step_update(len(losses) + 1)
        elif schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
