"""Tensors with a shape and no values (PyTorch 2.11 to 2.13)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensorMode as PlainFakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as inside_kernel
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "as_laid_out",
    "inside_kernel",
]

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The logger that gets a line for each exception that fake tensors raise."""
_aten = torch.ops.aten
_UNTAGGED = frozenset(
    getattr(_aten, f"{name}_backward").default for name in ("hardswish", "hardtanh", "hardsigmoid", "mish", "softplus")
)
"""Elementwise operators without PyTorch's tag."""
_OWN_LAYOUT = frozenset(("clone", "_to_copy", "masked_fill"))
"""Elementwise operators that lay out their result by rules of their own."""
_RESULT_FIRST = frozenset((_aten.threshold_backward.default,))
"""Elementwise operators whose kernel takes the second tensor first, and so its layout if both could be kept."""


class FakeTensorMode(PlainFakeTensorMode):
    """PyTorch's, with results of elementwise operators laid out as its kernels do."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().dispatch(func, types, args, kwargs)
        if type(found) is not FakeTensor or not _is_elementwise(func):
            return found
        with self:
            return as_laid_out(func, args, found)


def as_laid_out(func: Any, args: Any, found: Any) -> Any:
    """The result of an operator on fake or meta tensors, with the strides that a kernel gives it.

    PyTorch computes a result in 16 bits from operands in fp32, and a copy of an expanded operand is laid out in order.
    So what has its channels innermost on a device would not have them here.
    """
    if not isinstance(found, torch.Tensor) or not _is_elementwise(func):
        return found
    operands = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
    if all(leaf.is_contiguous() for leaf in operands) or any(leaf is found for leaf in operands):
        return found
    shape = found.shape
    if any(type(size) is not int for size in shape) or any(leaf.dim() > len(shape) for leaf in operands):
        return found
    ordered = operands[::-1] if func in _RESULT_FIRST else operands
    strides = compute_elementwise_output_strides(*(leaf.expand(shape) for leaf in ordered))
    if strides == found.stride():
        return found
    return torch.empty_strided(shape, strides, dtype=found.dtype, device=found.device)


@cache
def _is_elementwise(func: Any) -> bool:
    """Whether a result is laid out as all elementwise kernels do."""
    tagged = torch.Tag.pointwise in getattr(func, "tags", ())
    return func in _UNTAGGED or (tagged and func.overloadpacket.__name__ not in _OWN_LAYOUT)
