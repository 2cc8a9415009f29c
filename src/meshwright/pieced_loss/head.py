"""Make an output layer return `Logits`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.pieced_loss.cross_entropy import cross_entropy, nll_loss
from meshwright.pieced_loss.logits import Logits, Source, defer
from meshwright.pieced_loss.losses import Gradient
from meshwright.pieced_loss.recorded import functions

__all__ = ["HeadCalls", "Output", "output_layer"]
LOSSES = (cross_entropy, nll_loss)
"""The losses of class indices; importing them registers them."""

PRODUCTS = frozenset(functions("matmul mm __matmul__"))


@dataclass(frozen=True, kw_only=True)
class Output:
    """An output layer's shape, and how its loss is computed."""

    shape: tuple[int, int]
    """(classes, width) of its whole weight."""
    gradient: Gradient | None = None
    """A compiled kernel for the loss of a piece."""

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **more: Any) -> Logits:
        return defer(Source(hidden, weight, bias, gradient=self.gradient, **more))


_output: ContextVar[Output | None] = ContextVar("output_layer", default=None)


def output_layer(weight: Tensor) -> Output | None:
    """What to do with a product with this weight; None if it is not the output layer's."""
    output = _output.get()
    return output if output is not None and tuple(weight.shape) == output.shape else None


class HeadCalls(TorchFunctionMode):
    """While active, a product with a weight of the output layer's shape gives `Logits`.

    If another layer has the same shape, its result is computed when the next function reads it.
    """

    off_in_compiled = True
    """Compiled blocks run without the mode: the output layer is in none of them."""
    recorded_as = "output layer"
    """Tells the tensor axis that it may record programs of blocks under this mode."""

    def __init__(self, output: Output, lower: Callable[..., Any]) -> None:
        """`lower(function, args, kwargs)` calls a product with its arguments in one dtype."""
        super().__init__()
        self.output, self._lower = output, lower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(args, kwargs)
        if func in PRODUCTS and not kwargs and _is_layer(args[0], _transposed(args[1]), self.output.shape):
            return self._lower(self.output.logits, (args[0], args[1].t()), {})
        return func(*args, **kwargs)

    def _linear(self, args: Any, kwargs: Any) -> Any:
        def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            if _is_layer(input, weight, self.output.shape):
                return self.output.logits(input, weight, bias)
            with within(self.output):  # an axis that divides the layer defers it
                return F.linear(input, weight, bias)

        return self._lower(call, args, kwargs)


@contextmanager
def within(output: Output) -> Iterator[None]:
    token = _output.set(output)
    try:
        yield
    finally:
        _output.reset(token)


def _transposed(weight: Any) -> Any:
    return weight.t() if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _is_layer(hidden: Any, weight: Any, shape: tuple[int, int]) -> bool:
    """Whether these are plain operands of an output layer of this shape."""
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor)) or hidden.dtype != weight.dtype:
        return False
    divided = hasattr(hidden, "device_mesh") or hasattr(weight, "device_mesh")
    return not divided and tuple(weight.shape) == shape and hidden.dim() > 1 and not torch.compiler.is_compiling()
