"""Workspaces of convolutions, beside those that an H200 took."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from measured_workspaces import measured
from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.tracing.meter import Meter
from meshwright.tracing.workspaces import operator_workspaces

aten = torch.ops.aten
MIB = 1 << 20


def tensor(row: dict[str, Any], name: str) -> Tensor:
    shape = row[name]
    strides = row.get(f"{name}s") or torch.empty(shape, device="meta").stride()
    return torch.empty_strided(shape, strides, dtype=getattr(torch, row["dt"]), device="meta")


def rest(row: dict[str, Any]) -> tuple[Any, ...]:
    dims = len(row["x"]) - 2
    ones, zeros = [1] * dims, [0] * dims
    strides = row.get("stride", ones), row["pad"], row.get("dil", ones)
    return *strides, row.get("tr", False), row.get("opad", zeros), row.get("groups", 1)


def forward(row: dict[str, Any]) -> int:
    """What the trace adds for a measured row."""
    arguments = tensor(row, "x"), tensor(row, "w"), None, *rest(row)
    with as_on_cuda():
        y = aten.convolution.default(*arguments)
        return sum(map(sum, operator_workspaces(aten.convolution.default, arguments, y)))


def backward(row: dict[str, Any], mask: list[bool]) -> list[tuple[int, ...]]:
    arguments = tensor(row, "y"), tensor(row, "x"), tensor(row, "w"), [1], *rest(row), mask
    with as_on_cuda():
        return operator_workspaces(aten.convolution_backward.default, arguments, None)


def rows(dtype: str, part: str) -> list[dict[str, Any]]:
    found = [row for row in measured("convolutions") if row["dt"] == dtype and row.get("tf32", True)]
    return [row for row in found if sum(row.get(part, [])) >= 4 * MIB]


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.9), ("float32", 0.7)])
def test_forward_copies_tensors_to_the_layout_of_tensor_cores(dtype: str, share: float) -> None:
    own = rows(dtype, "f")
    near = [abs(forward(row) / sum(row["f"]) - 1) < 0.1 for row in own]
    assert len(own) > 100 and sum(near) >= share * len(own)


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.85), ("float32", 0.75)])
def test_so_does_the_gradient_of_the_input(dtype: str, share: float) -> None:
    own = [row for row in rows(dtype, "dx") if not row.get("copied")]
    told = [sum(backward(row, [True, False, False])[0]) for row in own]
    near = [abs(size / sum(row["dx"]) - 1) < 0.1 for row, size in zip(own, told, strict=True)]
    assert len(own) > 60 and sum(near) >= share * len(own)


def test_gradients_of_weights_take_copies_or_a_gradient_of_each_sample() -> None:
    own = [row for row in rows("bfloat16", "dw") if "case" in row and not row.get("copied")]
    told = [sum(backward(row, [False, True, False])[0]) for row in own]
    near = [abs(size / sum(row["dw"]) - 1) < 0.2 for row, size in zip(own, told, strict=True)]
    assert len(own) > 60 and sum(near) >= 0.85 * len(own)


def test_a_pointwise_convolution_is_a_product_of_the_tensors_as_they_are() -> None:
    row = {"x": [8, 256, 16000], "w": [512, 256, 1], "y": [8, 512, 16000], "pad": [0], "dt": "bfloat16"}
    assert forward(row) == 0
    assert backward(row, [True, True, False]) == [(), (8 * 512 * 256 * 4,)]  # an H200 takes as much


def test_channels_last_takes_a_copy_of_the_weight_only() -> None:
    row = {"x": [16, 64, 28, 28], "w": [128, 64, 3, 3], "pad": [1, 1], "dt": "bfloat16"}
    strided = row | {"xs": [64 * 28 * 28, 1, 28 * 64, 64]}
    copies = 2 * (16 * (64 + 128) * 28 * 28 + 128 * 64 * 9)
    assert (forward(row), forward(strided)) == (copies, 2 * 128 * 64 * 9)


def test_without_tensor_cores_forward_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"x": [16, 256, 28, 28], "w": [256, 256, 3, 3], "pad": [1, 1], "dt": "float32"}
    assert forward(row) > 0
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert forward(row) == 0


def test_only_a_gpu_takes_them() -> None:
    row = {"x": [2, 16, 8, 8], "w": [16, 16, 3, 3], "pad": [1, 1], "dt": "bfloat16"}
    arguments = tensor(row, "x"), tensor(row, "w"), None, *rest(row)
    y = aten.convolution.default(*arguments)
    assert operator_workspaces(aten.convolution.default, arguments, y) == []


def test_the_account_counts_them_at_the_peak() -> None:
    """What is live, and the copies of input, weight and output."""

    def peak() -> int:
        with FakeTensorMode():
            layer = nn.Conv2d(64, 64, 3, padding=1, bias=False, dtype=torch.bfloat16)
            x = torch.empty(4, 64, 32, 32, dtype=torch.bfloat16)
            with Meter(lambda run: None) as meter:
                layer(x)
        return meter.peak

    plain = peak()
    with as_on_cuda():
        assert peak() == plain + 2 * (2 * 4 * 64 * 32 * 32 + 64 * 64 * 9)


def test_a_transposed_convolution_to_few_channels_takes_no_tensor_cores_in_fp32() -> None:
    """It is the gradient of one that reads so few. An H200 took no workspace for its backward pass (docs/unseen.md)."""
    row = {
        "dt": "float32",
        "x": [64, 64, 32, 32],
        "w": [64, 3, 4, 4],
        "y": [64, 3, 64, 64],
        "stride": [2, 2],
        "tr": True,
    }
    row |= {"pad": [1, 1]}
    assert backward(row, [True, True, False]) == [(), ()] and forward(row) == 0
    more = row | {"w": [64, 8, 4, 4], "y": [64, 8, 64, 64]}
    assert all(map(sum, backward(more, [True, True, False])))
