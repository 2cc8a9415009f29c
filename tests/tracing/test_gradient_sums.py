"""Sums of a tensor's gradients take no memory of their own, as on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from meshwright.torch_private.modes import TorchDispatchMode
from meshwright.torch_private.tensors import storage_id
from meshwright.tracing.gradient_sums import GradientSums
from meshwright.tracing.meter import Meter
from meshwright.tracing.recorder import StepRecorder
from meshwright.tracing.step_counts import Messages

COUNT = 1 << 20
BYTES = 4 * COUNT


class Twice(torch.autograd.Function):
    """Its backward makes two tensors, and adds them up in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 5

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2 + gradients[0] * 3


def metered(loss: Callable[[Tensor], Tensor]) -> float:
    """The most tensors of COUNT elements at a time, by a meter."""
    with FakeTensorMode(), Meter(lambda run: None) as meter:
        loss(torch.empty(COUNT, requires_grad=True)).backward()
    return round(meter.peak / BYTES, 1)


def recorded(loss: Callable[[Tensor], Tensor]) -> float:
    """The same by the recorder of a step."""
    recorder = StepRecorder(Messages(), workspaces=False)
    recorder.enter("forward_backward")
    with FakeTensorMode(), recorder.recording():
        loss(torch.empty(COUNT, requires_grad=True)).backward()
    return round(max(sum(causes.values()) for causes in recorder.ledger.peaks().values()) / BYTES, 1)


peaks = pytest.mark.parametrize("peak", [metered, recorded])


@peaks
def test_a_tensor_that_is_used_twice_has_its_gradients_added_in_place(peak: Callable[..., float]) -> None:
    def loss(x: Tensor) -> Tensor:
        w = x * 2
        return (w * 3).sum() + (w * 4).sum()

    assert peak(loss) == 3  # x and two gradients


@peaks
def test_each_of_many_gradients_is_added_to_the_first(peak: Callable[..., float]) -> None:
    def loss(x: Tensor) -> Tensor:
        w = x * 2
        return torch.stack([(w * place).sum() for place in range(5)]).sum()

    assert peak(loss) == 3


@peaks
def test_a_function_s_own_sum_takes_memory(peak: Callable[..., float]) -> None:
    assert peak(lambda x: Twice.apply(x * 2).sum()) == 4  # x, two parts and their sum


@contextmanager
def sums_seen() -> Iterator[list[bool]]:
    found: list[bool] = []

    class See(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sums = GradientSums()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.add.Tensor:
                found.append(self.sums.in_place(func, args))
            if isinstance(result, Tensor):
                self.sums.note(storage_id(result.untyped_storage()))
            return result

    with FakeTensorMode(), See():
        yield found


def shared(w: Tensor) -> Tensor:
    """The gradient of the sum is that of both parts, one of which has another before the other is computed."""
    other, cosine = w * 3, w.cos()
    return ((w + other) * cosine).sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda w: w.sin().sum() + w.cos().sum(),
        lambda w: (w + w.sin()).square().sum(),
        lambda w: w[:4].sum() + w[2:].sin().sum() + w[3],
        lambda w: torch.logcumsumexp(w, 0).square().sum(),
        lambda w: torch.autograd.grad(w.sin().sum() + w.cos().sum(), w, create_graph=True)[0].sum(),
        shared,
    ],
)
def test_the_sums_in_place_are_those_of_pytorch(loss: Callable[[Tensor], Tensor]) -> None:
    """As many as autograd runs `add_` on tensors with values."""

    def run() -> None:
        loss(torch.ones(8, requires_grad=True) * 2).backward()

    with profile(activities=[ProfilerActivity.CPU]) as real:
        run()
    with sums_seen() as found:
        run()
    assert sum(found) == sum(event.count for event in real.key_averages() if event.key == "aten::add_")
