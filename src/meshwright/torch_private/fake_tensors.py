"""Tensors with a shape and no values (PyTorch 2.11 to 2.13)."""

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
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
    "inside_kernel",
]

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The logger that gets a line for each exception that fake tensors raise."""
