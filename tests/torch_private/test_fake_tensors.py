import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

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
    as_laid_out,
    inside_kernel,
)
from meshwright.torch_private.symbolic_shapes import GuardOnDataDependentSymNode
from meshwright.tracing.meter import Meter

BACKWARD = {
    **dict.fromkeys(("sigmoid_backward", "tanh_backward", "silu_backward", "gelu_backward", "mish_backward"), ()),
    **dict.fromkeys(("hardswish_backward", "hardsigmoid_backward"), ()),
    "threshold_backward": (0.0,),
    "hardtanh_backward": (-1.0, 1.0),
    "softplus_backward": (1.0, 20.0),
}
"""Operators of backward passes, with their numbers."""


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


def shuffled(seed: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose dims lie in any order in memory, and some of which are expanded."""
    drawn = random.Random(seed)
    order = drawn.sample(range(len(shape)), len(shape))
    sizes = [1 if drawn.random() < 0.3 else size for size in shape]
    dense = torch.ones([sizes[dim] for dim in order], dtype=dtype)
    return dense.permute([order.index(dim) for dim in range(len(shape))]).expand(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["add.Tensor", "mul.Tensor", "maximum", "eq.Tensor", "masked_fill", *BACKWARD])
def test_elementwise_results_are_laid_out_as_by_a_kernel(name: str, dtype: torch.dtype) -> None:
    """As by a CPU's here: it lays them out as a GPU does if all operands have the same dtype."""
    packet, _, overload = name.partition(".")
    operator = getattr(torch.ops.aten, packet)

    def run(seed: int) -> torch.Tensor:
        left, right = (shuffled(seed + place, [2, 3, 4, 2], dtype) for place in range(2))
        if name == "masked_fill":
            return operator.Scalar(left, right > 0, 0.0)
        return getattr(operator, overload or "default")(left, right, *BACKWARD.get(name, ()))

    for seed in range(0, 60, 2):
        with FakeTensorMode():
            found = run(seed).stride()
        assert found == run(seed).stride(), seed


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: Meter(lambda run: None)])
def test_what_a_model_expands_and_adds_to_channels_innermost_keeps_them_there(mode: Callable[[], Any]) -> None:
    with mode(), torch.device("meta" if mode is not FakeTensorMode else "cpu"):
        drawn = torch.ones(8, 16, 1, 1, dtype=torch.bfloat16).expand(-1, -1, 4, 4)
        places = torch.ones(4, 4, 16, dtype=torch.bfloat16).permute(2, 0, 1)
        assert (drawn + places).is_contiguous(memory_format=torch.channels_last)


def test_meta_results_are_laid_out_by_their_operands_too() -> None:
    turned = torch.empty(4, 3, dtype=torch.bfloat16, device="meta").t()
    in_order = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    assert as_laid_out(torch.ops.aten.add.Tensor, (turned, turned), in_order).stride() == turned.stride()
    assert as_laid_out(torch.ops.aten.mm.default, (turned, turned), in_order) is in_order
    assert as_laid_out(torch.ops.aten.add.Tensor, (in_order, in_order), in_order) is in_order


def test_results_in_place_and_of_unknown_size_are_left_as_they_are() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.ones(4, 4, dtype=torch.bfloat16).t()
        assert x.add_(1) is x and x.stride() == (1, 4)
        assert (x[x > 0] * x[0, 0]).dim() == 1


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
