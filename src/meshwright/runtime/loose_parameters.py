"""Parameters beside the laid-out models: nobody averages their gradients over the data ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import JobError
from meshwright.runtime.own_loop import OwnLoop
from meshwright.torch_private.autograd import backward_id

OWNER = "_meshwright_loop"
"""Attribute of parameters: a weak reference to the loop that they belong to."""

_last_pass: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
"""The last backward pass that reached the parameters of optimizers that update no laid-out model."""


def refuse_loose(optimizer: Optimizer, updated: list[OwnLoop], alive: Iterable[OwnLoop]) -> None:
    """Raise if an optimizer updates parameters whose gradients are this rank's alone.

    `updated` are the models of which it updates parameters. An optimizer that updates none of them may have nothing to
    do with the loop: it is refused once a backward pass goes through a laid-out model and through its parameters.
    """
    if any(loop.axes.data_ranks > 1 for loop in updated):
        for parameter in _trained(optimizer):
            if not hasattr(parameter, OWNER):
                raise JobError(_message(parameter, "The optimizer of a laid-out model also updates"))
    elif not updated:
        _watch_beside([loop for loop in alive if loop.axes.data_ranks > 1 and loop.was_called], optimizer)


def _watch_beside(loops: list[OwnLoop], optimizer: Optimizer) -> None:
    trained = _trained(optimizer)
    if not loops or not trained:
        return
    if optimizer not in _last_pass:
        _last_pass[optimizer] = _note_passes(trained)
        warnings.warn(_message(trained[0], f"{type(optimizer).__name__} updates"), stacklevel=4)
    elif any(_last_pass[optimizer] == [loop.watch.last_pass] for loop in loops):
        raise JobError(_message(trained[0], f"{type(optimizer).__name__} updates"))


def _note_passes(parameters: list[nn.Parameter]) -> list[int]:
    found = [-2]

    def note(_: torch.Tensor) -> None:
        found[0] = backward_id()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(note)
    return found


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.requires_grad and p.grad is not None]


def _message(parameter: nn.Parameter, does: str) -> str:
    return (
        f"{does} a parameter of shape {tuple(parameter.shape)} that no laid-out model has, so its gradient is not "
        "averaged over the data ranks; make it a part of the model, or lay out its module with mw.parallelize, too."
    )
