"""What loops do to a model that nobody planned for: parts changed, called otherwise, wrapped, copied."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from loop_programs import Side, batch, plain, sgd


def compiled_before(side: Side) -> None:
    """The inner model compiled by the user, after the layout."""
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    inner.blocks[0].compile(backend="eager")
    plain(side)


def module_replaced(side: Side) -> None:
    """A new head after the layout, as for fine-tuning, and an optimizer of what is there."""
    torch.manual_seed(3)
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    inner.leave = nn.Linear(8, 3)
    optimizer = sgd(inner.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def parameter_replaced(side: Side) -> None:
    torch.manual_seed(3)
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    inner.temperature = nn.Parameter(torch.tensor(0.5))
    optimizer = sgd(inner.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def data_replaced(side: Side) -> None:
    """`p.data = ...` of the same shape."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in side.model.parameters():
            parameter.data = parameter.data * 0.9


def loose_parameter(side: Side) -> None:
    """A trained number beside the model, in the model's optimizer."""
    scale = nn.Parameter(torch.tensor(1.0))
    optimizer = sgd([*side.model.parameters(), scale])
    for x, y in side.batches():
        F.mse_loss(side.model(x) * scale, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_module_beside(side: Side) -> None:
    """A second module that nobody laid out, with its own optimizer."""
    torch.manual_seed(5)
    head = nn.Linear(3, 3)
    optimizer, other = sgd(side.model.parameters()), sgd(head.parameters())
    for x, y in side.batches():
        F.mse_loss(head(side.model(x)), y).backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()


def group_added_later(side: Side) -> None:
    named = dict(side.model.named_parameters())
    optimizer = sgd([p for name, p in named.items() if name.startswith("blocks")])
    for step, (x, y) in enumerate(side.batches()):
        if step == 1:
            optimizer.add_param_group({"params": [p for n, p in named.items() if n.startswith("leave")], "lr": 0.01})
        side.loss(x, y).backward()
        optimizer.step()
        side.model.zero_grad()


def checkpointed(side: Side, reentrant: bool = False) -> None:
    """Recomputes the whole model in the backward pass."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        x = x.clone().requires_grad_()
        F.mse_loss(checkpoint(side.model, x, use_reentrant=reentrant), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed_reentrant(side: Side) -> None:
    checkpointed(side, reentrant=True)


def inner_model_called(side: Side) -> None:
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        F.mse_loss(inner(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def parts_called(side: Side) -> None:
    """Calls the model's modules one by one, past its `forward`."""
    model: Any = side.model
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        hidden = model.enter(x)
        for block in model.blocks:
            hidden = block(hidden)
        F.mse_loss(model.leave(hidden), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def functional(side: Side) -> None:
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        output = torch.func.functional_call(side.model, dict(side.model.named_parameters()), (x,))
        F.mse_loss(output, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def calls_in_flight(side: Side) -> None:
    """Two calls, an evaluation between them, and their passes in the other order."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        first = side.loss(x, y)
        with torch.no_grad():
            side.model(batch(99)[0])
        second = side.loss(-x, y)
        second.backward()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_by_user(side: Side) -> None:
    model = torch.compile(side.model, backend="eager")
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_of_the_inner_model(side: Side) -> list[float]:
    """A moving average of the weights, in a copy that is called."""
    inner: Any = side.model.module if isinstance(side.model, mw.Parallel) else side.model
    average = copy.deepcopy(inner)
    optimizer, told = sgd(side.model.parameters()), []
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(average.parameters(), inner.parameters(), strict=True):
                old.lerp_(new, 0.5)
            told.append(float(average(batch(99)[0]).square().mean()))
    return told


def moving_average(side: Side) -> None:
    """A moving average of `named_parameters` in plain tensors, as scripts keep it."""
    average = {name: parameter.detach().clone() for name, parameter in side.model.named_parameters()}
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in side.model.named_parameters():
            average[name].lerp_(parameter.detach(), 0.5)
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            parameter.copy_(average[name])
    side.loss(*side.part(batch(5))).backward()  # the average is loaded
    optimizer.step()


def wrapped_in_ddp(side: Side) -> None:
    model: Any = side.model
    if isinstance(side.model, mw.Parallel):
        model = nn.parallel.DistributedDataParallel(side.model)
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def toggled(side: Side) -> None:
    """Freezes norms by `eval()`, and switches back and forth."""
    optimizer = sgd(side.model.parameters())
    for x, y in side.batches():
        side.model.eval()
        loss = side.loss(x, y)
        side.model.train()
        loss.backward()
        optimizer.step()
        side.model.zero_grad(set_to_none=False)


def under_inference_mode(side: Side) -> list[float]:
    optimizer, told = sgd(side.model.parameters()), []
    for x, y in side.batches():
        with torch.inference_mode():
            told.append(float(side.model(batch(99)[0]).square().mean()))
        side.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told


PROGRAMS = [
    compiled_before,
    module_replaced,
    parameter_replaced,
    data_replaced,
    loose_parameter,
    plain_module_beside,
    group_added_later,
    checkpointed,
    checkpointed_reentrant,
    inner_model_called,
    parts_called,
    functional,
    calls_in_flight,
    compiled_by_user,
    copy_of_the_inner_model,
    moving_average,
    wrapped_in_ddp,
    toggled,
    under_inference_mode,
]
