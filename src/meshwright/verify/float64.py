"""A job in float64: there rounding is too small to hide a defect, and too small to look like one.

Parameters, buffers and batches are converted; nothing else of the job changes, so the converted job goes through every
strategy as any job does. A model that asks for float32 by name (norms and rotary tables often do, for the sake of
bf16) gets float64, or else it would round as fp32 does in those places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from meshwright.describe.dtypes import WORDS
from meshwright.describe.structure import map_tensors
from meshwright.facts.job import Job
from meshwright.strategies.forward import wrap_forward
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.modules import REGISTERED
from meshwright.torch_private.trees import tree_leaves, tree_map
from meshwright.verify.evidence import ROUNDING


def in_double(job: Job) -> Job:
    """The job with parameters, buffers and batches in float64. Take its steps in `double_arithmetic`."""
    collate = job.collate or default_collate

    def loss(output: Any, batch: Any) -> Any:
        with double_arithmetic():
            return job.loss(output, batch)

    return replace(
        job,
        model=lambda: _doubled(job.model()),
        loss=loss,
        sample=None if job.sample is None else lambda n: to_double(job.sample(n)),  # type: ignore[misc]
        collate=lambda items: to_double(collate(items)),
    )


def to_double(tree: Any) -> Any:
    """Floating tensors of a tree in float64."""
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree)


@contextmanager
def double_arithmetic() -> Iterator[None]:
    """New tensors are float64 where nobody says otherwise, and also where float32 is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def _doubled(model: nn.Module) -> nn.Module:
    """After the builder, so that it draws the same numbers as ever."""
    model.double()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in REGISTERED and _holds_narrow(value):
                setattr(module, name, tree_map(_double_unless_parameter, value))
    wrap_forward(model, _in_double)
    return model


def _in_double(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Also where a model is only looked at, before the first step."""
    with double_arithmetic():
        return forward(*args, **kwargs)


def _holds_narrow(value: Any) -> bool:
    """Whether a plain attribute has tensors in it that `module.double()` does not know."""
    if value is None or isinstance(value, bool | int | float | str | nn.Module):
        return False
    return any(_double_unless_parameter(leaf) is not leaf for leaf in tree_leaves(value))


def _double_unless_parameter(leaf: Any) -> Any:
    known = not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter) or not leaf.is_floating_point()
    return leaf if known else leaf.double()


class _Widened(TorchFunctionMode):
    """Asks for float64 where float32 was asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


class NarrowWatch(TorchDispatchMode):
    """Remembers the smallest precision that something is computed in, and the first operator that does it."""

    def __init__(self) -> None:
        super().__init__()
        self.precision: str | None = None
        self.operator = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _floating((args, kwargs)):
            for dtype in _floating(result):
                self._note(NARROW.get(dtype), str(func))
        return result

    def _note(self, precision: str | None, operator: str) -> None:
        if precision is not None and (self.precision is None or ROUNDING[precision] > ROUNDING[self.precision]):
            self.precision, self.operator = precision, operator


NARROW = {**WORDS, torch.complex64: "fp32"}


def _floating(tree: Any) -> list[torch.dtype]:
    """Dtypes of the tensors that are computed with."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
