"""Autograd's engine and its graph (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.autograd.function import BackwardCFunction
from torch.autograd.variable import Variable

__all__ = ["BackwardCFunction", "DeviceType"]

run_engine: Callable[..., Any] = Variable._execution_engine.run_backward
"""Runs a backward pass below `Tensor.backward`, where function modes do not intercept it."""


def engine_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """Context in which `Tensor.backward`, `autograd.backward` and `autograd.grad` run the engine by `wrap(run)`."""
    name = "_engine_run_backward"
    return patch.object(torch.autograd, name, wrap(getattr(torch.autograd, name)))


def wrap_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Like `engine_wrapped`, but from now on."""
    torch.autograd._engine_run_backward = wrap(torch.autograd._engine_run_backward)


backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward pass that this thread runs, or -1."""

at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Call a function when the backward pass that this thread runs has ended. A function that was called so may add others,
which come after those that are there."""

Hooks = tuple[Callable[..., Any], Callable[..., Any]]


def run_unhooked(hooks: Hooks, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function without the innermost hooks on saved tensors if they are these, which saves calling them."""
    active = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if active is None or active[0] is not hooks[0]:
        return func(*args, **kwargs)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
