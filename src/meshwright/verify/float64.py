"""Convert a job to float64, where rounding is too small to hide a defect or to look like one.

Only parameters, buffers and batches are converted, so every strategy takes the converted job like any other. Code that
names float32 (norms and rotary tables often do, because of bf16) gets float64; otherwise it would round like fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.assemble.operator_dtypes import BACKWARD
from meshwright.describe.data_source import collate_of
from meshwright.describe.dtypes import WORDS
from meshwright.describe.structure import map_tensors
from meshwright.facts.job import Job
from meshwright.recording.wrap_forward import wrap_forward
from meshwright.torch_private.autograd import backward_id, engine_inside
from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.modules import REGISTERED
from meshwright.torch_private.trees import tree_leaves, tree_map
from meshwright.verify.evidence import ROUNDING, tensors_in


def in_double(job: Job) -> Job:
    """The job with parameters, buffers and batches in float64. Take its steps in `double_arithmetic`."""
    collate = collate_of(job)

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
    """The tree with its floating-point tensors in float64."""
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree)


@contextmanager
def double_arithmetic() -> Iterator[None]:
    """Make new tensors float64, both by default and where code names float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


def _doubled(model: nn.Module) -> nn.Module:
    """Convert a model after it is built, so that its builder draws the usual random numbers."""
    model.double()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            narrow = name not in REGISTERED and any(_double_unless_parameter(t) is not t for t in tensors_in(value))
            if narrow:  # `module.double()` does not know plain attributes
                setattr(module, name, tree_map(_double_unless_parameter, value))
    wrap_forward(model, _in_double)
    return model


def _in_double(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run forward in float64, also when the model is only inspected before the first step."""
    with double_arithmetic():
        return forward(*args, **kwargs)


def _double_unless_parameter(leaf: Any) -> Any:
    known = not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter) or not leaf.is_floating_point()
    return leaf if known else leaf.double()


class _Widened(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of every call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BACKWARD:
            with engine_inside(self):  # checkpointed parts of the model run again
                return func(*args, **(kwargs or {}))
        if backward_id() != -1 and not torch.is_grad_enabled():  # a derivative, whose dtype is its function's
            return func(*args, **(kwargs or {}))
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]  # a list: this runs at every call
        if not kwargs:
            return func(*args)
        return func(*args, **{key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()})


class NarrowWatch(TorchDispatchMode):
    """Records the lowest precision that an operator computes in, and the first such operator."""

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
    """Dtypes of the floating-point and complex tensors in a tree."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
