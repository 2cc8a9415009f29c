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
"""The backward pass below `Tensor.backward`, which no mode over torch functions sees."""


def engine_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """While active, `Tensor.backward`, `autograd.backward` and `autograd.grad` run the engine through `wrap(run)`."""
    name = "_engine_run_backward"
    return patch.object(torch.autograd, name, wrap(getattr(torch.autograd, name)))


backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is in, or -1."""
