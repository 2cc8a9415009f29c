import logging

import pytest
import torch

from meshwright.torch_private import fake_tensors
from meshwright.torch_private.fake_tensors import (
    FAKE_TENSOR_LOG,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    inside_kernel,
)
from meshwright.torch_private.symbolic_shapes import GuardOnDataDependentSymNode


def test_tensors_have_a_shape_and_a_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensor = torch.ones(2, 3) + mode.from_tensor(torch.ones(3))
    assert type(tensor) is FakeTensor
    assert tensor.fake_mode is mode and tensor.fake_device == torch.device("cpu")
    assert tensor.shape == (2, 3)


def test_a_kernel_sees_meta_tensors() -> None:
    with FakeTensorMode() as mode:
        tensor = torch.ones(2, 3)
    assert not mode.in_kernel_invocation
    with inside_kernel(mode):
        assert mode.in_kernel_invocation
        view = torch.ops.aten.t.default(tensor)
    assert tensor.device.type == "cpu"
    assert FakeTensor(mode, view, tensor.fake_device).shape == (3, 2)


def test_values_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTensorMode():
        with pytest.raises(DataDependentOutputException):
            bool(torch.ones(()))
        with pytest.raises(DynamicOutputShapeException):
            torch.ones(3).nonzero()


@pytest.mark.parametrize(
    "kind", [UnsupportedFakeTensorException, UnsupportedOperatorException, GuardOnDataDependentSymNode]
)
def test_other_refusals_are_exceptions(kind: type) -> None:
    assert issubclass(kind, Exception)


def test_refusals_are_logged_under_this_name() -> None:
    assert FAKE_TENSOR_LOG in logging.root.manager.loggerDict
    assert fake_tensors.FakeTensor.__module__ == FAKE_TENSOR_LOG


def test_a_functionalized_tensor_is_of_this_class() -> None:
    """AOTAutograd captures with it, so a model's caches may keep it."""
    from torch._functorch.aot_autograd import aot_function

    seen: list[type] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x))
        return x.sin()

    aot_function(function, fw_compiler=lambda module, inputs: module)(torch.ones(2))
    assert FunctionalTensor in seen
