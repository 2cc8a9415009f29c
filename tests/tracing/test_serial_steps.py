"""Kernels whose threads wait for memory at each place of a dim."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.facts.catalogue import hardware_of
from meshwright.facts.cluster import Cluster
from meshwright.planner.kernels import STEP
from meshwright.tracing.meter import Meter, OperatorRun
from meshwright.tracing.serial_steps import PLANE_WAIT, POOLED, SCANS, SELECTED, SOFTMAXES, WAIT

LENGTH, WIDTH = 2048, 1920


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def steps_of(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The steps of the operator of that name in forward and backward."""
    found: list[OperatorRun] = []
    x.requires_grad_()
    with Meter(found.append):
        result = function(x)
        result.backward(torch.empty_like(result))
    return sum(one.steps for one in found if one.name == name)


def test_a_running_sum_waits_for_each_place_however_many_columns_there_are() -> None:
    for samples in (1, 8):
        x = empty(samples, LENGTH, WIDTH)
        found: list[OperatorRun] = []
        with Meter(found.append):
            x.cumsum(1)
            x.logcumsumexp(1)
        assert [run.steps for run in found] == [pytest.approx(LENGTH * WAIT * SCANS[run.name]) for run in found]


def test_along_the_innermost_dim_threads_share_a_row() -> None:
    assert steps_of("logcumsumexp", lambda x: x.logcumsumexp(-1), empty(64, LENGTH)) < LENGTH * WAIT
    assert steps_of("_softmax", lambda x: x.softmax(0), empty(LENGTH, 32)) < LENGTH * WAIT


def test_a_softmax_over_rows_goes_through_them_three_times() -> None:
    x = empty(LENGTH, WIDTH)
    assert steps_of("_softmax", lambda x: x.softmax(0), x) == pytest.approx(LENGTH * WAIT * SOFTMAXES["_softmax"])
    backward = steps_of("_softmax_backward_data", lambda x: x.softmax(0), x)
    assert backward == pytest.approx(LENGTH * WAIT * SOFTMAXES["_softmax_backward_data"])


def test_small_planes_are_interpolated_one_after_another() -> None:
    def resize(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    x = empty(32, 64, 10, 10)
    assert steps_of("upsample_bilinear2d", resize, x) == pytest.approx(32 * 64 * WAIT * PLANE_WAIT)
    last = empty(32, 64, 10, 10).to(memory_format=torch.channels_last)
    assert steps_of("upsample_bilinear2d", resize, last) < 32 * 64 * WAIT * PLANE_WAIT


def test_selecting_reads_all_for_each_digit_and_pooling_looks_through_windows() -> None:
    assert steps_of("topk", lambda x: x.topk(24).values, empty(8, LENGTH)) == 8 * LENGTH * 4 * SELECTED
    pooled = steps_of("max_pool2d_with_indices_backward", lambda x: F.max_pool2d(x, 2), empty(4, 8, 16, 16))
    assert pooled == pytest.approx(4 * 8 * 256 * POOLED)


def test_a_place_takes_what_was_measured_on_an_h200() -> None:
    seconds = WAIT * STEP / hardware_of(Cluster.parse("1xH200")).bandwidth
    assert LENGTH * seconds == pytest.approx(0.777e-3, rel=0.02)
