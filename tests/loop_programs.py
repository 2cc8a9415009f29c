"""Training loops as users write them, for plain PyTorch in one process and for `mw.parallelize` on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import meshwright as mw
from meshwright.assemble.world import World
from minimal import Block

STEPS, SAMPLES, WIDTH = 3, 12, 8


class Net(nn.Module):
    """Blocks that tp can divide, rows that no two ranks share evenly, a scalar, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.frozen(self.leave(x)) * self.temperature

    def guess(self, x: Tensor) -> Tensor:
        """Calls the model as `generate` does."""
        return self(x).argmax(-1)


def batch(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 5, generator=generator), torch.randn(samples, 3, generator=generator)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


class Side:
    """One side of a comparison: a model, and the part of a batch that it is given."""

    def __init__(self, model: nn.Module, rank: int = 0, ranks: int = 1) -> None:
        self.model, self.rank, self.ranks = model, rank, ranks

    def part(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.chunk(self.ranks)[self.rank] for tensor in tensors)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from (self.part(batch(step)) for step in range(STEPS))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)

    def no_sync(self) -> Any:
        return self.model.no_sync() if isinstance(self.model, mw.Parallel) else nullcontext()

    def mean(self, total: Tensor, weight: int) -> Tensor:
        return self.model.global_mean(total, weight) if isinstance(self.model, mw.Parallel) else total / weight


def plain(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        optimizer.zero_grad()
        side.loss(x, y).backward()
        optimizer.step()


def clipped(side: Side) -> list[float]:
    optimizer, norms = sgd(side.model.parameters()), []
    for x, y in side.batches():
        side.loss(x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def clipped_by_largest(side: Side) -> list[float]:
    optimizer, norms = sgd(side.model.parameters()), []
    for x, y in side.batches():
        side.loss(x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.01, norm_type=float("inf"))))
        torch.nn.utils.clip_grad_value_(side.model.parameters(), 0.005)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def zeroed_in_place(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        optimizer.zero_grad(set_to_none=False)
        side.loss(x, y).backward()
        optimizer.step()


def zeroed_by_model(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.model.zero_grad()
        side.loss(x, y).backward()
        optimizer.step()


def never_zeroed(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()


def discarded(side: Side) -> None:
    """A backward pass whose gradients are thrown away."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        (10 * side.loss(x, y)).backward()
        optimizer.zero_grad()
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        for part in zip(x.chunk(3), y.chunk(3), strict=True):
            (side.loss(*part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_without_sync(side: Side) -> list[float]:
    optimizer, norms = sgd(side.model.parameters()), []
    for x, y in side.batches():
        *first, last = zip(x.chunk(3), y.chunk(3), strict=True)
        with side.no_sync():
            for part in first:
                (side.loss(*part) / 3).backward()
        (side.loss(*last) / 3).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def evaluated(side: Side) -> list[float]:
    """Evaluates between backward and step, and after the step."""
    optimizer, losses = sgd(side.model.parameters()), []
    x_held, y_held = batch(99)
    for x, y in side.batches():
        side.loss(x, y).backward()
        for late in (False, True):
            side.model.eval()
            with torch.no_grad():
                losses.append(float(side.loss(x_held, y_held)))
            side.model.train()
            if not late:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def two_losses(side: Side) -> None:
    """Two backward passes over one call."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        output = side.model(x)
        F.mse_loss(output, y).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def two_calls(side: Side) -> None:
    """One backward pass over two calls."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        (side.loss(x, y) + 0.5 * side.loss(-x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers(side: Side) -> None:
    named = dict(side.model.named_parameters())
    first = sgd([p for name, p in named.items() if name.startswith("blocks")])
    second = SGD([p for name, p in named.items() if not name.startswith("blocks")], lr=0.01)
    for x, y in side.batches():
        side.loss(x, y).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()


def scheduled(side: Side) -> list[float]:
    optimizer = sgd(side.model.parameters())
    scheduler, rates = StepLR(optimizer, 1, gamma=0.5), []
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def adam_with_groups(side: Side) -> None:
    """Weight decay for matrices only, and a changed gradient."""
    decayed = [p for p in side.model.parameters() if p.dim() > 1]
    others = [p for p in side.model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)
    for x, y in side.batches():
        side.loss(x, y).backward()
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def frozen_for_a_step(side: Side) -> None:
    """Freezes a part and trains it again, as GANs do."""
    optimizer = sgd(side.model.parameters())
    for step, (x, y) in enumerate(side.batches()):
        for name, parameter in side.model.named_parameters():
            if name.startswith("blocks.0"):
                parameter.requires_grad_(step != 1)
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def clamped_weights(side: Side) -> None:
    """Changes weights by hand after the step."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in side.model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def uneven(side: Side) -> None:
    """A last batch that does not divide, with a mean over the samples of all ranks."""
    optimizer = sgd(side.model.parameters())
    for step in range(STEPS):
        x, y = side.part(batch(step, SAMPLES if step < STEPS - 1 else 7))
        total = F.mse_loss(side.model(x), y, reduction="sum")
        side.mean(total, len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def other_methods(side: Side) -> list[float]:
    """Calls a method of the model that calls the model."""
    found = []
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(float(side.model.guess(batch(99)[0]).sum()))
    return found


LOOPS: dict[str, Callable[[Side], Any]] = {
    loop.__name__: loop
    for loop in (
        plain,
        clipped,
        clipped_by_largest,
        zeroed_in_place,
        zeroed_by_model,
        never_zeroed,
        discarded,
        accumulated,
        accumulated_without_sync,
        evaluated,
        two_losses,
        two_calls,
        two_optimizers,
        scheduled,
        adam_with_groups,
        frozen_for_a_step,
        clamped_weights,
        uneven,
        other_methods,
    )
}

Outcome = tuple[dict[str, Tensor], Any]
"""The state after the loop, and what the loop returned."""


def run_plainly() -> dict[str, Outcome]:
    """Each loop with nothing of ours in it."""
    found = {}
    for name, loop in LOOPS.items():
        torch.manual_seed(0)
        model = Net()
        told = loop(Side(model))
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}, told
    return found


def run_loops(world: World, strategy: str, names: list[str] | None = None) -> dict[str, Outcome | str]:
    """Each loop under a strategy, or the error that refused it."""
    described = {"sample": batch(0)[0], "tensor_plan": {"leave": "whole"}} if "=" in strategy else {}
    model = mw.parallelize(Net, strategy, seed=0, world=world, **described)
    start = model.state_dict()
    found: dict[str, Outcome | str] = {}
    for name in names or LOOPS:
        model.zero_grad()
        model.load_state_dict(start)
        if model.loop.loss_scale is not None:
            model.loop.loss_scale.value = 1024.0  # at which nothing overflows
        try:
            told = LOOPS[name](Side(model, model.data_rank, model.data_ranks))
            found[name] = model.state_dict(), told
        except Exception as error:
            import traceback

            found[name] = f"{type(error).__name__}: {error}" + traceback.format_exc()
    return found
