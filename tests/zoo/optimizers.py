"""Optimizers and schedules as people use and write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from meshwright import Job
from zoo.jobs import STRATEGIES, Trunk, entry, make_job


def job(optimizer: Any, **parts: Any) -> Job:
    return make_job(Trunk, optimizer=optimizer, **parts)


@entry()
def nesterov() -> Job:
    """SGD with Nesterov's momentum and weight decay, clipped."""
    return job(
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1), max_norm=0.5
    )


@entry()
def adamw_groups() -> Job:
    """AdamW in groups by name, under a schedule of two parts."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        decayed = [p for name, p in params.named() if name.endswith("weight") and p.dim() > 1]
        rest = [p for name, p in params.named() if not (name.endswith("weight") and p.dim() > 1)]
        return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 5)], [2])

    return job(optimizer, schedule=schedule)


@entry()
def adafactor() -> Job:
    """torch's Adafactor: its state is of rows and columns."""
    return job(lambda params: torch.optim.Adafactor(params, lr=1e-2))


class Lamb(torch.optim.Optimizer):
    """Layer-wise trust ratios: the norm of a whole parameter decides its step."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.99 ** state["step"])
                update = m / (v.sqrt() + 1e-6) + group["decay"] * p
                ratio = torch.where((p.norm() > 0) & (update.norm() > 0), p.norm() / update.norm(), 1.0)
                p.add_(update * ratio, alpha=-group["lr"])


@entry()
def lamb() -> Job:
    """Lamb in twenty lines: a step by the norm of whole parameters."""
    return job(Lamb)


@entry()
def rmsprop() -> Job:
    """RMSprop, centred, under OneCycleLR, which also moves the momentum."""
    return job(
        lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.5, centered=True),
        schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10),
    )


@entry()
def adagrad() -> Job:
    """Adagrad: its state exists before the first step."""
    return job(lambda params: torch.optim.Adagrad(params, lr=1e-2))


@entry()
def nadam_lambda() -> Job:
    """NAdam under LambdaLR."""
    return job(
        lambda params: torch.optim.NAdam(params, lr=1e-2),
        schedule=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )


@entry(refused=dict.fromkeys(("single", *STRATEGIES), "LBFGS"))
def lbfgs() -> Job:
    """LBFGS, which wants to compute the loss again."""
    return job(lambda params: torch.optim.LBFGS(params, lr=0.1))


@entry()
def plateau() -> Job:
    """ReduceLROnPlateau, whose step takes the loss."""
    return job(
        lambda params: torch.optim.SGD(params, lr=0.05),
        schedule=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
    )


@entry()
def muon() -> Job:
    """Muon for matrices, and nothing else is trained: it takes whole matrices."""

    def build() -> nn.Module:
        model = Trunk()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        return model

    return make_job(build, optimizer=lambda params: torch.optim.Muon(params, lr=1e-2))


@entry()
def signs() -> Job:
    """Rprop: steps by the signs of gradients."""
    return job(lambda params: torch.optim.Rprop(params, lr=1e-2))
