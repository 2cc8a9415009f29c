"""The host's part of a pass, by unit. The clock is made up: it ticks whenever Python of the model asks it to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tiny_jobs
from meshwright.describe.model import describe
from meshwright.errors import JobError
from meshwright.tracing.host_passes import Stopwatch, _Rounds, time_host_passes, time_reference
from meshwright.tracing.noted_results import NoteResults, RepeatResults


class Clock:
    """Time passes only when something slow runs."""

    now = 0.0

    def __call__(self) -> float:
        return Clock.now


class Slow(tiny_jobs.Block):
    """A block whose Python takes a second forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Clock.now += 1.0
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(tiny_jobs.WIDTH, tiny_jobs.WIDTH)
        self.blocks = nn.ModuleList(Slow() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    Clock.now += 0.25
    return output.sum(), len(output)


JOB = replace(
    tiny_jobs.plain,
    model=Model,
    loss=loss,
    sample=lambda n: {"x": torch.randn(n, 4, tiny_jobs.WIDTH)},
)


def test_python_counts_where_it_runs() -> None:
    found = time_host_passes(JOB, describe(JOB), clock=Clock())
    assert found.units == {
        "first": (0.0, 0.0),
        **{f"blocks.{place}": (1.0, 0.0) for place in range(3)},
        "loss": (0.25, 0.0),
    }


class LooksAtDtypes(Slow):
    """A block whose Python takes a second longer if it computes in bf16 under the engine's table of dtypes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        Clock.now += x.dtype == torch.bfloat16 and x.exp().dtype == torch.float32
        return x


def test_a_pass_in_16_bits_is_timed_as_the_engine_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Slow", LooksAtDtypes)
    facts = describe(JOB)
    seconds = {precision: time_host_passes(JOB, facts, precision, Clock()) for precision in ("fp32", "bf16")}
    assert seconds["fp32"].units["blocks.1"] == (1.0, 0.0) and seconds["bf16"].units["blocks.1"] == (2.0, 0.0)


def test_a_round_on_a_busy_host_and_a_lucky_one_count_for_nothing() -> None:
    usual = [[2.0, 4.0]]
    rounds = _Rounds([*[usual] * 13, [[6.0, 12.0]], usual], [*[1.0] * 13, 3.0, 0.25])
    assert rounds.speed == 1.0 and rounds.at(rounds.speed) == usual


def test_another_host_scales_it() -> None:
    found = replace(time_host_passes(JOB, describe(JOB), clock=Clock()), reference=2.0).at(3.0)
    assert found.units["blocks.0"] == (1.5, 0.0)
    assert found.reference == 3.0


@pytest.mark.parametrize("job", [tiny_jobs.transformer, tiny_jobs.convolutions, tiny_jobs.hf_gpt2])
def test_models_of_several_kinds_are_timed(job: Any) -> None:
    facts = describe(job)
    found = time_host_passes(job, facts)
    assert set(found.units) == {call.name for call in facts.calls} | {"loss"}
    assert sum(map(sum, found.units.values())) > 0 and time_reference() > 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_takes_as_long_on_the_host_for_any_number_of_time_steps(kind: type[nn.RNNBase]) -> None:
    def operators(length: int) -> float:
        job = replace(
            JOB,
            model=lambda: kind(tiny_jobs.WIDTH, 4, batch_first=True),
            inputs=lambda batch: (batch,),
            loss=lambda output, batch: (output[0].sum(), 1),
            sample=lambda count: torch.randn(count, length, tiny_jobs.WIDTH),
        )
        return sum(map(sum, time_host_passes(job, describe(job)).units.values()))

    assert operators(200) < 10 * operators(2)


def test_a_stopwatch_gives_backward_to_the_unit_that_it_returns_to() -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    watch = Stopwatch(2, lambda: next(now))
    watch.enter(0)
    watch.enter(1)
    watch.begin_backward()
    watch.return_to(0)
    watch.end()
    assert watch.times == [[3.0, 5.0], [3.0, 4.0]]


@contextmanager
def linear_on_meta() -> Iterator[nn.Linear]:
    with torch.device("meta"):
        yield nn.Linear(3, 5)


def test_repeated_results_are_like_the_noted_ones() -> None:
    with linear_on_meta() as layer:
        x = torch.empty(2, 3)
        with NoteResults() as notes:
            layer(x).relu_().sum().backward()
        shapes = {name: p.grad.shape for name, p in layer.named_parameters() if p.grad is not None}
        layer.zero_grad()
        with RepeatResults(notes.results) as repeat:
            layer(x).relu_().sum().backward()
        assert {name: p.grad.shape for name, p in layer.named_parameters() if p.grad is not None} == shapes
        assert repeat.made + repeat.passed == len(notes.results) and repeat.made >= 4
        repeat.restart()
        with pytest.raises(RuntimeError, match="not the same each time"), repeat:
            layer(x[:, :3] * 2)


class Dropped(Model):
    """Draws a number for each block, which is skipped if the number is below `rate`."""

    rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if not torch.rand([]) < self.rate:
                x = block(x)
        return x


class AllDropped(Dropped):
    rate = 1.0


def test_blocks_that_a_drawn_number_keeps_are_timed() -> None:
    job = replace(JOB, model=Dropped)
    passes = time_host_passes(job, describe(job), clock=Clock())
    assert passes.units["blocks.1"][0] == 1.0


def test_blocks_that_are_skipped_on_meta_tensors_are_named() -> None:
    with pytest.raises(JobError, match=r"blocks\.0 computes nothing"):
        time_host_passes(replace(JOB, model=AllDropped), describe(JOB), clock=Clock())
