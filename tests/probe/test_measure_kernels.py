"""Every operator of small steps can be run by itself; bounds of memory and time hold. Clocks are made up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tiny_jobs
from meshwright.describe.model import describe
from meshwright.facts.job import Job
from meshwright.facts.strategy import Strategy
from meshwright.probe import measure_kernels as measuring
from meshwright.probe.kernel_clock import CpuClock, clock_of, kernel_seconds
from meshwright.probe.measure_kernels import measure_kernels
from meshwright.probe.operator_inputs import input_bytes, make_runnable
from meshwright.torch_private.fake_tensors import FakeTensorMode
from meshwright.tracing.operator_calls import FunctionCalls, OperatorCall, step_calls

CPU = torch.device("cpu")


class Runs:
    """A clock that runs everything, and says what it is told."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self.runs = list(seconds), 0

    def once(self, run: Callable[[], Any], size: int) -> float:
        run()
        self.runs += 1
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.cells(self.token(x))[0]


recurrent = Job(
    model=Recurrent,
    inputs=lambda batch: (batch["x"],),
    loss=lambda output, batch: (output.sum(), len(output)),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    sample=lambda n: {"x": torch.randint(11, (n, 5))},
    global_batch=4,
)


def calls_of(job: Job, text: str = "single", ranks: int = 1) -> list[OperatorCall]:
    return step_calls(job, describe(job), Strategy.parse(text).resolve(ranks), ranks=ranks, device="cpu").calls


@pytest.mark.parametrize(
    "job", [tiny_jobs.transformer, tiny_jobs.convolutions, recurrent], ids=lambda job: str(job.model)
)
def test_every_operator_of_a_step_runs_by_itself(job: Job) -> None:
    calls = calls_of(job)
    found = measure_kernels(calls, CPU, clock=Runs(1e-3))
    assert found.failed == {}
    assert {kernel.signature for kernel in found.kernels} == {call.signature for call in calls}
    assert all(kernel.seconds == 1e-3 for kernel in found.kernels)


@pytest.mark.thorough
def test_operators_of_divided_steps_run_too() -> None:
    found = measure_kernels(calls_of(tiny_jobs.transformer, "tp=2,fsdp", ranks=4), CPU, clock=Runs(1e-3))
    assert found.failed == {} and len(found.kernels) > 30


def collected(function: Callable[[], Any]) -> dict[str, OperatorCall]:
    with FakeTensorMode(), FunctionCalls() as calls:
        function()
    return calls.collector.calls


def test_layouts_aliases_and_indices_are_kept() -> None:
    def function() -> None:
        x = torch.empty(6, 4).t()
        x.mul_(x)
        torch.empty(5, 3).gather(1, torch.empty(5, 2, dtype=torch.long))
        torch.empty(7, 3)[torch.empty(4, dtype=torch.long)]
        torch.nn.functional.embedding(torch.empty(2, dtype=torch.long), torch.empty(3, 4))
        torch.empty(4, 9).index_add_(0, torch.empty(3, dtype=torch.long), torch.empty(3, 9))
        torch.rand(3, 3)
        torch.empty(4, 4).masked_fill(torch.empty(4, 4, dtype=torch.bool), 0.0)

    calls = collected(function)
    (multiplied,) = (call for call in calls.values() if call.run.name == "mul_")
    assert multiplied.args[0] == multiplied.args[1] and multiplied.args[0].stride == (1, 4)
    assert measure_kernels(calls.values(), CPU, clock=Runs(1.0)).failed == {}


def test_the_result_has_the_layout_of_the_traced_one() -> None:
    (call,) = collected(lambda: torch.empty(3, 4).t() + torch.empty(4, 1)).values()
    found = make_runnable(call, CPU, {})()
    assert (found.shape, found.stride()) == ((4, 3), (1, 4))
    assert torch.isfinite(found).all()
    assert input_bytes(call) == 4 * (12 + 4 + 12)


def test_what_does_not_fit_or_comes_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list(collected(lambda: torch.empty(64, 64) @ torch.empty(64, 64)).values())
    monkeypatch.setattr(measuring, "_room", lambda device: 100)
    assert "it needs 48 KiB of 100 B" in next(iter(measure_kernels(calls, CPU, clock=Runs(1.0)).failed.values()))
    monkeypatch.undo()
    late = measure_kernels(calls, CPU, seconds=-1.0, clock=Runs(1.0))
    assert not late.kernels and "were over" in next(iter(late.failed.values()))


def test_an_operator_that_fails_is_named_and_the_others_go_on() -> None:
    calls = collected(lambda: (torch.empty(2, 2) @ torch.empty(2, 2), torch.empty(3) + 1))
    broken = next(call for call in calls.values() if call.run.name == "mm")
    broken.args = (broken.args[0], 5)
    found = measure_kernels(calls.values(), CPU, clock=Runs(1.0))
    assert [kernel.name for kernel in found.kernels] == ["add"]
    assert list(found.failed) == [broken.signature]


def test_the_median_of_runs_counts_but_the_first() -> None:
    clock = Runs(9.0, 1.0, 5.0, 2.0)
    assert kernel_seconds(lambda: None, 1, clock, budget=100.0) == 2.0
    slow = Runs(3.0, 2.0)
    assert kernel_seconds(lambda: None, 1, slow, budget=1.0) == 2.0 and slow.runs == 2


def test_a_cpu_clock_reads_its_clock_around_the_run() -> None:
    ticks = iter([10.0, 12.5])
    assert CpuClock(lambda: next(ticks)).once(lambda: None, 8) == 2.5
    assert isinstance(clock_of(CPU), CpuClock)
