"""Parameters and buffers of unusual kinds, and state that a forward pass moves."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import Job
from zoo.jobs import CLASSES, STRATEGIES, VOCABULARY, WIDTH, Trunk, entry, make_job, tokens, vectors


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.zeros(1))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.temperature = nn.Parameter(torch.ones([]) * 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(torch.cat([x, x @ self.empty.t()], 1)) * self.scale.exp() / self.temperature + self.shift


@entry()
def scalars() -> Job:
    """Parameters without dims, of one element and of none."""
    return make_job(Scalars)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.trunk.enter.requires_grad_(False)
        self.trunk.blocks[1].requires_grad_(False)
        self.trunk.blocks[2].up.bias.requires_grad_(False)
        self.trunk.blocks[3].norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


@entry()
def frozen_parts() -> Job:
    """A frozen layer, a frozen block, and single frozen parameters among trained ones."""
    return make_job(Frozen)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 5)
        self.trunk = Trunk()
        self.trunk.blocks[2].spare = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


@entry()
def unused_parameters() -> Job:
    """A layer that is never called, and a parameter inside a block that is never read."""
    return make_job(Unused, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))


class Adapters(nn.Module):
    """Each sample's task chooses its adapter; which are used differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk(leave=nn.Identity())
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        y = self.trunk(x)
        out = y.new_zeros(len(y), CLASSES)
        for number, adapter in enumerate(self.adapters):
            chosen = task == number
            if chosen.any():
                out = out.index_put((chosen.nonzero()[:, 0],), adapter(y[chosen]))
        return out


def tasks(n: int) -> dict[str, Tensor]:
    return {**vectors(n), "task": torch.arange(n) * 4 // n}


@entry()
def task_adapters() -> Job:
    """Adapters by task: ranks use different parameters, and some use none of an adapter."""
    return make_job(Adapters, tasks, inputs=lambda batch: (batch["x"], batch["task"]))


@entry()
def adapter_of_nobody() -> Job:
    """Adapters of which some are used by no sample of the batch, under Adam."""
    return make_job(
        Adapters,
        lambda n: {**vectors(n), "task": torch.arange(n) % 2 * 2},
        inputs=lambda batch: (batch["x"], batch["task"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )


class Routed(nn.Module):
    """Top-1 routing: each token goes to one expert, whose output the router's probability scales."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out.index_add_(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + out.view_as(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Routed() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


@entry()
def routed_experts() -> Job:
    """Top-1 routed experts, some of which see no token."""
    return make_job(Mixture, tokens)


class Gated(nn.Module):
    """Layers that a counter of steps switches on."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk(leave=nn.Identity())
        self.late = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("passes", torch.tensor(0))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.trunk(x)
        if self.training:
            self.passes += 1
            self.calls += 1
        return self.head(y + self.late(y) if int(self.passes) % 2 == 0 else y)


@entry()
def counter_in_forward() -> Job:
    """A counter that each forward moves, and a layer that it switches on."""
    return make_job(Gated)


class MovingTarget(nn.Module):
    """As BYOL and data2vec: the target follows the network in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)

    @torch.no_grad()
    def _follow(self) -> None:
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self._follow()
        return self.online(x) - 0.5 * self.target(x)


@entry()
def ema_in_forward() -> Job:
    """An EMA target that each forward moves towards the network."""
    return make_job(MovingTarget)


class Codebook(nn.Module):
    """As VQ-VAE with EMA: a forward moves the codebook by the batch's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.register_buffer("counts", torch.ones(4))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        with torch.no_grad():
            chosen = F.one_hot(nearest, 4).to(y.dtype)
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.lerp_(chosen.t() @ y / self.counts[:, None], 0.1)
        return self.leave(y + (self.codes[nearest] - y).detach())


@entry()
def codebook_in_forward() -> Job:
    """A codebook that each forward moves by the statistics of its samples."""
    return make_job(Codebook)


class RunningMean(nn.Module):
    """A norm of the author's own with running statistics, written with tensor operators."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk(leave=nn.Identity())
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.trunk(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return self.head(y - self.mean)


@entry()
def own_running_mean() -> Job:
    """A running mean over samples that the forward assigns anew."""
    return make_job(RunningMean)


class Queue(nn.Module):
    """As MoCo: a queue of earlier features, moved in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH + 4, CLASSES)
        self.register_buffer("queue", torch.randn(4, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        scores = y @ self.queue.clone().t()
        with torch.no_grad():
            self.queue.copy_(torch.cat([y.detach(), self.queue])[:4])
        return self.head(torch.cat([y, scores], 1))


@entry()
def queue_in_forward() -> Job:
    """A queue of features that the forward moves, in a buffer that is not saved."""
    return make_job(Queue)


class SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x))


@entry(refused=dict.fromkeys(("single", *STRATEGIES), "sparse=False"))
def sparse_gradients() -> Job:
    """Embedding(sparse=True)."""
    return make_job(SparseRows, tokens, optimizer=lambda params: torch.optim.SGD(params, lr=0.05))


class Views(nn.Module):
    """A non-contiguous parameter, a parameter that is a view of a larger one, and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Parameter(torch.randn(CLASSES, WIDTH).t())
        large = torch.randn(2, WIDTH)
        self.first = nn.Parameter(large[0])
        self.register_buffer("wide", torch.rand(1).expand(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.first * self.wide).masked_fill(self.mask, 0.0) @ self.across


@entry()
def views_as_parameters() -> Job:
    """Non-contiguous parameters, views of larger tensors, an expanded buffer."""
    return make_job(Views)
