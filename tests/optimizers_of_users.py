"""Optimizers and schedules as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Adafactor, Optimizer


class Lamb(Optimizer):
    """A trust ratio: the norm of a tensor over that of its update."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                trust = parameter.norm() / (momentum.norm() + 1e-6)
                parameter.sub_(momentum * trust * group["lr"])


class NormedOverAll(Optimizer):
    """Divides by the norm of all gradients. Keeps a number and a tensor without dims."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in given]).sum().sqrt()
        for parameter in given:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state.setdefault("seen", torch.zeros(())).add_(1)
            parameter.sub_(parameter.grad / norm * self.param_groups[0]["lr"] / state["count"] ** 0.5)


class LocalSums(Optimizer):
    """A trust ratio of what `to_local` gives, where there is such a thing: wrong on shards."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                own, gradient = (t.to_local() if hasattr(t, "to_local") else t for t in (parameter, parameter.grad))
                own.sub_(gradient * (own.norm() / (gradient.norm() + 1e-6)) * group["lr"])


class CountsUpdates:
    """As timm's schedules: `step` wants a number of epochs, `step_update` one of updates."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.seen = optimizer, 0

    def step(self, epoch: int, metric: float | None = None) -> None:
        pass

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.seen = num_updates
        for group in self._optimizer.param_groups:
            group["lr"] = 0.05 / (1 + num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def momentum(params: Any) -> SGD:
    return SGD(params, lr=0.05, momentum=0.9)


def adafactor(params: Any) -> Adafactor:
    return Adafactor(params, lr=0.05)
