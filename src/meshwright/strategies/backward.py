"""Run a backward pass that bypasses torch function modes, so that a mode can stay on while it runs.

A mode that handles `Tensor.backward` or `torch.autograd.backward` is off during the call. A direct call of the autograd
engine does not go through modes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.torch_private.autograd import run_engine


def backward_pass(func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The engine call that `func`, one of the two, would make; None if its arguments are not plain tensors."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    roots = _listed(given["self"] if func is Tensor.backward else given["tensors"])
    gradients = _listed(given["gradient"] if func is Tensor.backward else given["grad_tensors"]) or (None,) * len(roots)
    inputs = _listed(given["inputs"])
    if not all(isinstance(tensor, Tensor) for tensor in (*roots, *inputs)) or given.get("grad_variables") is not None:
        return None
    whole = tuple(
        torch.ones_like(root) if gradient is None and root.requires_grad and root.numel() == 1 else gradient
        for root, gradient in zip(roots, gradients, strict=True)
    )
    create = given["create_graph"]
    retain = create if given["retain_graph"] is None else given["retain_graph"]
    return partial(run_engine, roots, whole, retain, create, inputs, allow_unreachable=True, accumulate_grad=True)


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)
