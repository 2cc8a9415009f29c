"""The catalogue's times of convolutions, held against those that were measured on an H200."""

from statistics import mean, median

import pytest
import torch
import torch.nn.functional as F

from meshwright.describe.as_on_cuda import as_on_cuda
from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.facts.costs import Kernel, Size
from meshwright.facts.kernel_table import MeasuredKernel, shipped_table
from meshwright.planner import kernels
from meshwright.tracing.meter import Meter, OperatorRun

H200 = hardware_of(Cluster(devices_per_node=8, device="H200-141GB"))


def measured() -> list[MeasuredKernel]:
    """Convolutions that are products of matrices: not those of single channels."""
    table = shipped_table("H200-141GB")
    assert table is not None
    return [one for one in table.kernels if one.kind == "convolution" and not one.steps]


def told(one: MeasuredKernel, *, copied: float) -> float:
    sizes = {name: Size(getattr(one, name)) for name in ("flops", "bytes")}
    shape = tuple(map(Size, one.shape))
    kernel = Kernel(name=one.name, kind=one.kind, dtype=one.dtype, shape=shape, copied=Size(copied), **sizes)
    return kernels.seconds(kernel, 1, 1, H200)


def test_convolutions_of_the_shipped_table() -> None:
    ratios = [told(one, copied=one.copied) / one.seconds for one in measured()]
    assert len(ratios) == 240
    assert mean(abs(ratio - 1) for ratio in ratios) < 0.25
    assert 0.9 < median(ratios) < 1.1


@pytest.mark.parametrize("name", ["convolution", "convolution_backward"])
def test_copies_to_another_layout_take_most_of_a_small_convolution(name: str) -> None:
    copying = [one for one in measured() if one.name == name and one.copied and one.dtype == "bf16"]
    ratios = {way: [told(one, copied=one.copied * way) / one.seconds for one in copying] for way in (0, 1)}
    assert median(ratios[0]) < 0.7 < median(ratios[1]) < 1.1


@pytest.mark.parametrize(("dtype", "kernel", "copies"), [("bf16", 3, True), ("bf16", 1, False), ("fp64", 3, False)])
def test_a_trace_knows_the_copies(dtype: str, kernel: int, copies: bool) -> None:
    kind = {"bf16": torch.bfloat16, "fp64": torch.float64}[dtype]
    runs: list[OperatorRun] = []
    with as_on_cuda(), Meter(runs.append):
        x = torch.empty(4, 16, 8, 8, dtype=kind, device="meta")
        weight = torch.empty(32, 16, kernel, kernel, dtype=kind, device="meta")
        y = F.conv2d(x, weight, padding=kernel // 2)
    copied = next(run.copied for run in runs if run.name == "convolution")
    assert copied == sum(tensor.numel() * tensor.itemsize for tensor in (x, weight, y)) * copies


def test_a_cpu_copies_nothing() -> None:
    runs: list[OperatorRun] = []
    with Meter(runs.append):
        F.conv2d(torch.empty(4, 16, 8, 8, device="meta"), torch.empty(32, 16, 3, 3, device="meta"))
    assert [run.copied for run in runs if run.name == "convolution"] == [0.0]


def test_pixels_that_tensor_cores_cannot_load_are_copied() -> None:
    def copied(side: int, channels: int, kind: torch.dtype = torch.bfloat16) -> float:
        runs: list[OperatorRun] = []
        with as_on_cuda(), Meter(runs.append):
            x = torch.empty(4, channels, side, side, dtype=kind, device="meta")
            F.conv2d(x, torch.empty(channels, channels, 1, 1, dtype=kind, device="meta"))
        return next(run.copied for run in runs if run.name == "convolution") / (x.numel() * x.itemsize)

    assert copied(14, 256) == 2
    assert copied(28, 256) == copied(14, 64) == copied(14, 256, torch.float32) == 0
    assert copied(7, 256, torch.float32) == 2


def test_a_bias_counts_as_one_more_copy_of_the_result() -> None:
    runs: list[OperatorRun] = []
    with as_on_cuda(), Meter(runs.append):
        x, weight, bias = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for shape in ((4, 64, 8, 8), (64, 64, 1, 1), (64,))
        )
        y = F.conv2d(x, weight, bias)
        y.backward(torch.empty_like(y))
    copied = {run.name: run.copied for run in runs if run.kind == "convolution"}
    assert copied == dict.fromkeys(("convolution", "convolution_backward"), y.numel() * y.itemsize)
