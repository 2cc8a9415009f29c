"""What loops do to gradients and updates that nobody planned for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

import meshwright as mw
from loop_programs import Side, sgd


def step_without_backward(side: Side) -> None:
    optimizer = Adam(side.model.parameters(), lr=1e-2)
    optimizer.step()
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def two_steps_of_one_gradient(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def backward_twice(side: Side) -> None:
    for x, y in side.batches():
        loss = side.loss(x, y)
        loss.backward()
        loss.backward()


def retained_graph(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        loss = side.loss(x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_without_graph(side: Side) -> None:
    with torch.no_grad():
        loss = side.loss(*next(side.batches()))
    loss.backward()


def scheduler_before_optimizer(side: Side) -> list[float]:
    optimizer = sgd(side.model.parameters())
    scheduler, rates = StepLR(optimizer, 1, gamma=0.5), []
    for x, y in side.batches():
        side.loss(x, y).backward()
        scheduler.step()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def forgotten_update(side: Side) -> list[float]:
    """The weights stay, and gradients grow."""
    norms = []
    for x, y in side.batches():
        side.loss(x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1e9)))
    return norms


def mean_loss_logged(side: Side) -> list[float]:
    optimizer, losses = sgd(side.model.parameters()), []
    for x, y in side.batches():
        total = F.mse_loss(side.model(x), y, reduction="sum") / 3
        loss = side.mean(total, len(x))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def clipped_by_hand(side: Side) -> None:
    """The norm of all gradients, computed in the loop."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        gradients = [p.grad for p in side.model.parameters() if p.grad is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.05 / norm))
        optimizer.step()
        optimizer.zero_grad()


def noise_of_each_rank(side: Side) -> None:
    """Changes gradients by other numbers on each rank."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + side.rank)
        optimizer.step()
        optimizer.zero_grad()


def gradients_cleared_by_hand(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for step, (x, y) in enumerate(side.batches()):
        side.loss(x, y).backward()
        optimizer.step()
        for parameter in side.model.parameters():
            if step % 2:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def gradients_by_autograd(side: Side) -> None:
    """`torch.autograd.grad` instead of `backward`."""
    trained = [p for p in side.model.parameters() if p.requires_grad]
    optimizer = sgd(trained)
    for x, y in side.batches():
        for parameter, gradient in zip(trained, torch.autograd.grad(side.loss(x, y), trained), strict=True):
            parameter.grad = gradient
        optimizer.step()


def gradient_penalty(side: Side) -> None:
    """A gradient of a gradient, as in WGAN-GP."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        x = x.clone().requires_grad_()
        output = side.model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (F.mse_loss(output, y) + slope.square().sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_of_the_input(side: Side) -> None:
    """An adversarial step, whose pass reaches no parameter that is asked for."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(side.loss(x, y), x)
        side.loss((x + 0.1 * slope.sign()).detach(), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def stepped_between(side: Side) -> None:
    """A step between forward and backward."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        first, second = side.loss(x, y), side.loss(-x, y)
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()


def hooked_gradients(side: Side) -> None:
    """A hook of the user on each parameter, which changes its gradient."""
    for parameter in side.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.5)
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def closure(side: Side) -> None:
    """A closure, which computes the gradient inside of the step."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():

        def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = side.loss(x, y)
            loss.backward()
            return loss

        optimizer.step(compute)


def updated_by_hand(side: Side) -> None:
    """No optimizer: the loop itself moves the weights."""
    for x, y in side.batches():
        side.model.zero_grad()
        side.loss(x, y).backward()
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.05)


def stepped_after_a_call(side: Side) -> None:
    """A step after a call whose backward pass was left out."""
    optimizer = sgd(side.model.parameters())
    for step, (x, y) in enumerate(side.batches()):
        loss = side.loss(x, y)
        if step != 1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_kept_on_the_model(side: Side) -> None:
    """The loss is an attribute that the model sets, and no output."""
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        vars(inner)["kept"] = output.square().mean()

    inner.leave.register_forward_hook(keep)
    optimizer = sgd(side.model.parameters())
    for x, _ in side.batches():
        side.model(x)
        inner.kept.backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = [
    step_without_backward,
    two_steps_of_one_gradient,
    backward_twice,
    retained_graph,
    loss_without_graph,
    scheduler_before_optimizer,
    forgotten_update,
    mean_loss_logged,
    clipped_by_hand,
    noise_of_each_rank,
    gradients_cleared_by_hand,
    gradients_by_autograd,
    gradient_penalty,
    gradient_of_the_input,
    stepped_between,
    hooked_gradients,
    closure,
    updated_by_hand,
    stepped_after_a_call,
    loss_kept_on_the_model,
]
