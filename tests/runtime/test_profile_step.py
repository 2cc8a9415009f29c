"""What the profiler saw, as spans: they are added up right, and a real step has them."""

from __future__ import annotations

import os

import pytest
import torch
from torch.autograd import DeviceType

from meshwright.environment import silent_profiler
from meshwright.runtime.profile_step import (
    StepProfile,
    coarsened,
    is_communication,
    merge,
    overlap,
    profile_step,
    total,
)


def test_spans_that_overlap_count_once() -> None:
    assert merge([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (3.0, 3.5), (7.0, 7.0)]) == ((0.0, 3.5), (4.0, 5.0))


def test_what_two_kinds_have_in_common() -> None:
    compute, communication = ((0.0, 4.0), (6.0, 8.0)), ((3.0, 7.0),)
    assert overlap(compute, communication) == pytest.approx(2.0)
    shares = StepProfile(seconds=10.0, compute=compute, communication=communication).shares
    assert shares == pytest.approx({"compute": 0.6, "communication": 0.4, "exposed": 0.2})


def test_communication_under_compute_is_not_exposed() -> None:
    shares = StepProfile(seconds=10.0, compute=((0.0, 9.0),), communication=((2.0, 5.0), (6.0, 7.0))).shares
    assert shares["communication"] == pytest.approx(0.4)
    assert shares["exposed"] == pytest.approx(0.0)


def test_the_smallest_gaps_are_closed_for_a_picture() -> None:
    spans = ((0.0, 1.0), (1.1, 2.0), (5.0, 6.0), (6.2, 7.0), (9.0, 10.0))
    assert coarsened(spans, 3) == ((0.0, 2.0), (5.0, 7.0), (9.0, 10.0))
    assert coarsened(spans, 5) == spans


def test_a_step_on_a_cpu_is_mostly_computing() -> None:
    one = torch.ones(300, 300)

    def step() -> None:
        for _ in range(50):
            torch.mm(one, one)

    found = profile_step(step, torch.device("cpu"))
    assert found.communication == ()
    assert 0 < total(found.compute) <= found.seconds
    assert all(0 <= start < end <= found.seconds for start, end in found.compute)
    assert found.shares["compute"] > 0.3


def test_the_profiler_is_only_silent_where_the_user_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with silent_profiler():
        assert os.environ["KINETO_LOG_LEVEL"] == "99"
    assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    with silent_profiler():
        assert os.environ["KINETO_LOG_LEVEL"] == "1"
    assert os.environ["KINETO_LOG_LEVEL"] == "1"


class Event:
    """Stands in for an event of the profiler."""

    def __init__(self, name: str, *, on_gpu: bool = False, named_range: bool = False) -> None:
        self._name, self._on_gpu, self._named_range = name, on_gpu, named_range

    def name(self) -> str:
        return self._name

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self._on_gpu else DeviceType.CPU

    def is_user_annotation(self) -> bool:
        return self._named_range


def test_what_is_communication_on_a_cpu() -> None:
    names = ("gloo:all_reduce", "aten::mm", "c10d::allreduce_", "Optimizer.step#AdamW.step")
    assert [is_communication(Event(name), on_gpu=False) for name in names] == [True, False, None, None]


def test_what_is_communication_on_a_gpu() -> None:
    kernels = [Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", on_gpu=True), Event("sm90_gemm", on_gpu=True)]
    ranges = [Event("FSDP::all_gather", on_gpu=True, named_range=True), Event("aten::mm")]
    assert [is_communication(event, on_gpu=True) for event in kernels + ranges] == [True, False, None, None]
