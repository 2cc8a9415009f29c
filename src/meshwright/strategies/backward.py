"""A backward pass that no mode over torch functions handles, so that a mode can be on while it runs.

`Tensor.backward` and `torch.autograd.backward` hand themselves to the mode, which is off then; the engine does
not.
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
    """What `func`, one of the two, would run; None for something else than tensors to differentiate."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    roots = _listed(asked["self"] if func is Tensor.backward else asked["tensors"])
    gradients = _listed(asked["gradient"] if func is Tensor.backward else asked["grad_tensors"]) or (None,) * len(roots)
    inputs = _listed(asked["inputs"])
    if not all(isinstance(tensor, Tensor) for tensor in (*roots, *inputs)) or asked.get("grad_variables") is not None:
        return None
    whole = tuple(
        torch.ones_like(root) if gradient is None and root.requires_grad and root.numel() == 1 else gradient
        for root, gradient in zip(roots, gradients, strict=True)
    )
    create = asked["create_graph"]
    retain = create if asked["retain_graph"] is None else asked["retain_graph"]
    return partial(run_engine, roots, whole, retain, create, inputs, allow_unreachable=True, accumulate_grad=True)


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)
